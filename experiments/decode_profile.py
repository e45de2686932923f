"""Where the time of decode steps goes: the device's kernels, by JAX's profiler."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trace_jax.config import ConfigError


class Kernel(NamedTuple):
    """One run of a kernel, in nanoseconds."""

    name: str
    start: float
    duration: float


def kernels_of(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels that a GPU ran during `run`, which has to wait for them; copies are not among them.

    Raises:
        ConfigError: there is no GPU.
    """
    if jax.default_backend() != "gpu":
        raise ConfigError(f"a profile by kernels needs a GPU; the devices here are {jax.default_backend()}s.")
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        return [
            Kernel(event.name, event.start_ns, event.duration_ns)
            for plane in planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream") and "Compute" in line.name
            for event in line.events
        ]


def summary(kernels: Iterable[Kernel], steps: int, most: int = 24) -> list[dict[str, Any]]:
    """Rows of milliseconds a step.

    These are the step, from the first kernel's start to the last one's end, the sum of all kernels, the `most` largest
    by name, and the others.
    """
    kernels = list(kernels)
    times: dict[str, tuple[int, float]] = {}
    for kernel in kernels:
        calls, time = times.get(kernel.name, (0, 0.0))
        times[kernel.name] = calls + 1, time + kernel.duration
    span = max(k.start + k.duration for k in kernels) - min(k.start for k in kernels)
    ordered = sorted(times.items(), key=lambda item: -item[1][1])
    rest = [value for _, value in ordered[most:]]

    def row(name: str, calls: int, time: float) -> dict[str, Any]:
        per_step = {"ms a step": round(time / steps / 1e6, 4), "of the step": round(time / span, 4)}
        return {"kernel": name, "calls a step": round(calls / steps, 1), **per_step}

    return [
        row("step", len(kernels), span),
        row("all kernels", len(kernels), sum(k.duration for k in kernels)),
        *(row(name, *value) for name, value in ordered[:most]),
        *([row("others", sum(c for c, _ in rest), sum(t for _, t in rest))] if rest else []),
    ]
