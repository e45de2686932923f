"""requirements.txt and pyproject.toml give the same ranges: `make env` is the package's own environment."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_requirements_equal_the_package_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = ("math", "reasoning", "smollm2", "test", "notebooks")
    declared = project["dependencies"] + [line for name in installed for line in extras[name]]
    lines = (line.strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    assert sorted(line for line in lines if line and not line.startswith("#")) == sorted(declared)
