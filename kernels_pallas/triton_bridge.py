"""Whether Triton kernels can run here. Imports neither triton nor jax_triton: both are optional."""

import importlib.metadata

import jax
from jax.extend.backend import get_backend

REQUIRED = {"triton": (3, 6), "jax-triton": (0, 3, 1)}
"""Distributions and the oldest release of each that the kernels are written for."""


def unavailable() -> str | None:
    """What Triton kernels lack on this machine, None if they can run: what every Triton `refusal` asks first."""
    platform = jax.default_backend()
    if platform != "gpu":
        return f"it needs an NVIDIA GPU, the default backend is {platform}"
    if "rocm" in get_backend().platform_version.lower():
        return "it needs an NVIDIA GPU, this one is AMD's"
    for distribution, oldest in REQUIRED.items():
        wanted = f"it needs {distribution} >= {'.'.join(map(str, oldest))}"
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{wanted}, which is not installed"
        if _release(version) < oldest:
            return f"{wanted}, installed is {version}"
    return None


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (3, 6, 0) of "3.6.0+cu128"."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
