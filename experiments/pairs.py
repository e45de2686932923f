"""Side-by-side timing: interleaved pairs, their ratios with an interval, and the table of a benchmark."""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.config import to_mapping
from trace_jax.runs import describe_environment

RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedRatio:
    """Cost of one thing over another's: the median of the ratios of adjacent runs and its 95 % bootstrap interval.

    `seconds` and `baseline_seconds` are medians; `target` is the largest ratio allowed, None where nothing is promised.
    """

    ratio: float
    low: float
    high: float
    seconds: float
    baseline_seconds: float
    pairs: int
    target: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the whole interval keeps the target, misses it, or straddles it."""
        if self.target is None:
            return "-"
        if self.high <= self.target:
            return "kept"
        return "missed" if self.low > self.target else "not resolved"


def seconds(run: Callable[[], Any]) -> float:
    """Wall-clock seconds of a call that blocks until its results are ready."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


Prepare = Callable[[], Callable[[], Any]]
"""Prepares one run, untimed, and returns the call to be timed."""


def time_pairs(
    candidates: Mapping[str, Prepare],
    baseline: Prepare,
    *,
    pairs: int,
    targets: Mapping[str, float | None],
    warmup: int = 5,
) -> dict[str, PairedRatio]:
    """Times every candidate beside the baseline in interleaved pairs: AB, the next candidate, ..., then BA in turn.

    All are warmed up together and measured in the same rounds, so that nothing that drifts falls on one of them.
    """
    times = {name: np.zeros((pairs, 2)) for name in candidates}
    for i in range(-warmup, pairs):
        for name, candidate in candidates.items():
            for column in (0, 1) if i % 2 == 0 else (1, 0):
                elapsed = seconds((candidate, baseline)[column]())
                if i >= 0:
                    times[name][i, column] = elapsed
    return {name: paired_ratio(t[:, 0], t[:, 1], target=targets[name]) for name, t in times.items()}


def paired_ratio(
    candidate: np.ndarray, baseline: np.ndarray, *, target: float | None = None, seed: int = 0
) -> PairedRatio:
    """Median ratio of paired times; the interval is the bootstrap's over pairs (percentile)."""
    ratios = candidate / baseline
    draws = np.random.default_rng(seed).integers(ratios.size, size=(RESAMPLES, ratios.size))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
    return PairedRatio(
        ratio=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        seconds=float(np.median(candidate)),
        baseline_seconds=float(np.median(baseline)),
        pairs=int(ratios.size),
        target=target,
    )


def markdown(results: Mapping[str, PairedRatio], baseline: str, what: str) -> str:
    """One row per method; ratios of one run on one machine, so comparable within the table only."""
    lines = [
        f"| method | {what}, ms | `{baseline}`, ms | ratio, median of pairs [95 %] | pairs | target | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        target = "-" if r.target is None else f"<= {r.target:.2f}"
        lines.append(
            f"| {name} | {1e3 * r.seconds:.2f} | {1e3 * r.baseline_seconds:.2f} "
            f"| {r.ratio:.4f} [{r.low:.4f}, {r.high:.4f}] | {r.pairs} | {target} | {r.verdict} |"
        )
    return "\n".join(lines)


def write_benchmark(
    name: str,
    results: Mapping[str, PairedRatio],
    config: Any,
    *,
    baseline: str,
    what: str,
    sizes: Mapping[str, Any],
) -> str:
    """Writes `<config.out>/<name>.json` and `.md`; returns the Markdown."""
    environment = describe_environment()
    command = shlex.join(["python", "-m", f"experiments.{name}", *sys.argv[1:]])
    report = {
        "benchmark": name,
        "command": command,
        "environment": environment,
        "baseline": baseline,
        "sizes": dict(sizes),
        "results": {
            method: dataclasses.asdict(result) | {"verdict": result.verdict}
            for method, result in results.items()
        },
        "config": to_mapping(config),
    }
    packages, devices = environment["packages"], environment["devices"]
    text = "\n\n".join(
        [
            markdown(results, baseline, what),
            f"`{command}` on {devices['count']} x {devices['kind']}, JAX {packages['jax']}, "
            f"Python {environment['python']}, commit {environment['git_commit']}. "
            + ", ".join(f"{key} {value}" for key, value in sizes.items())
            + ".",
        ]
    )
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text + "\n")
    return text
