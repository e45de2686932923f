"""What the documents say can be done: commands exist and their options are accepted, links lead somewhere."""

import importlib
import pathlib
import re
import shlex

import hydra
import pytest
import yaml

from experiments.common import CONFIGS
from trace_jax.config import from_mapping
from trace_jax.rl import MethodConfig
from trace_jax.rl.run import RunConfig
from trace_jax.rl.warmstart import WarmStartConfig

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = {
    name: re.sub(r"<!--.*?-->", "", (ROOT / name).read_text(), flags=re.DOTALL)
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")),
    )
}
COMMAND = re.compile(r"python -m experiments\.(\w+)([^`\n|]*)")
COMMANDS = sorted(
    {(match[1], match[2].strip()) for text in DOCUMENTS.values() for match in COMMAND.finditer(text)}
)
# The dataclass that a Hydra script fills.
HYDRA = {
    "train": RunConfig,
    "warmstart": WarmStartConfig,
    "compare": ("experiments.compare", "CompareConfig"),
    "evaluate": ("experiments.evaluate", "EvaluateConfig"),
    "ageing": ("experiments.ageing", "AgeingConfig"),
    "generate": ("experiments.generate", "GenerateConfig"),
    "likelihood": ("experiments.likelihood", "LikelihoodConfig"),
    "export_hf": ("experiments.export_hf", "ExportConfig"),
    "bench_rollout": ("experiments.bench_rollout", "RolloutBenchConfig"),
}


def config_class(script: str):
    found = HYDRA[script]
    return getattr(importlib.import_module(found[0]), found[1]) if isinstance(found, tuple) else found


def test_there_are_commands():
    assert {"train", "compare", "evaluate", "report", "conformance"} <= {script for script, _ in COMMANDS}


@pytest.mark.parametrize("script", sorted({script for script, _ in COMMANDS}))
def test_documented_scripts_exist(script):
    assert (ROOT / "experiments" / f"{script}.py").exists()


@pytest.mark.parametrize(
    ("script", "options"), [c for c in COMMANDS if c[0] in HYDRA and c[1] not in ("", "method=my_method")]
)
def test_documented_options_are_accepted(script, options):
    words = shlex.split(options)
    overrides = [word for word in words if word != "-m"]
    if "-m" in words:  # the first run of the sweep
        overrides = [word.split(",")[0] for word in overrides]
    with hydra.initialize_config_dir(CONFIGS, version_base="1.3"):
        config = hydra.compose(script, overrides)
    from_mapping(config_class(script), config)


def test_the_engine_s_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENTS["docs/engine.md"], flags=re.DOTALL)
    names: dict = {}
    exec(block, names)
    assert len(names["results"]) == 4 and len(names["trajectories"]) == 4


def test_every_script_is_documented():
    modules = {
        "__init__",
        "bench",
        "common",
        "decode_profile",
        "kernel_cases",
        "rounding_cases",
        "kernel_list",
        "pairs",
        "prefill_cases",
        "throughput",
    }
    scripts = {p.stem for p in (ROOT / "experiments").glob("*.py")} - modules
    assert scripts == set(re.findall(r"`python -m experiments\.(\w+)", DOCUMENTS["README.md"]))


def test_every_method_is_documented():
    for path in (ROOT / "configs" / "method").glob("*.yaml"):
        assert f"`{path.stem}`" in DOCUMENTS["README.md"]


def test_the_example_method_is_a_method():
    (block,) = re.findall(r"```yaml\n(.*?)```", DOCUMENTS["README.md"], flags=re.DOTALL)
    fields = yaml.safe_load(block)
    assert fields.pop("defaults") == ["defaults", "_self_"]
    method = from_mapping(MethodConfig, fields)
    assert method.format == "mxfp4" and method.sites == ("key", "value")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#:]+)\)", DOCUMENTS[name])
    missing = [link for link in links if not (ROOT / name).parent.joinpath(link).exists()]
    assert not missing


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_exist(name):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([a-z-]+)", DOCUMENTS[name]))
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
