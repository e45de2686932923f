"""What a run ran on: commit, package versions, devices."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "grain",
    "numpy",
    "ml_dtypes",
)


def describe_environment() -> dict[str, Any]:
    """A JSON-able description of code, packages and devices. Initialises JAX's backend."""
    devices = jax.devices()
    return {
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed_files": (_git("status", "--porcelain") or "").splitlines(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": jax.process_count(),
        },
    }


def _git(*arguments: str) -> str | None:
    """Output of git on the code's own repository; None for an installed copy, or where there is no git."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.rstrip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
