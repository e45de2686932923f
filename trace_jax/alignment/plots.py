"""Figures of a comparison, drawn with Matplotlib without a display."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from trace_jax.alignment.summary import GAP, Run, by_layer

Methods = dict[str, Sequence[Run]]


def _curves(methods: Methods, metric: str, label: str, path: Path, *, log: bool, window: int = 1) -> None:
    fig, ax = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for method, runs in methods.items():
        # Seeds of unequal length, or a metric that some steps lack: the steps that all of them have.
        curves = [
            {row["step"]: row[metric] for row in run.rows if isinstance(row.get(metric), int | float)}
            for run in runs
        ]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        if not steps:
            continue
        smooth = np.asarray([_moving_average(np.asarray([c[s] for s in steps]), window) for c in curves])
        steps = steps[len(steps) - smooth.shape[1] :]
        (line,) = ax.plot(steps, smooth.mean(axis=0), label=method)
        if len(runs) > 1:
            ax.fill_between(
                steps, smooth.min(axis=0), smooth.max(axis=0), color=line.get_color(), alpha=0.15, linewidth=0
            )
    if log:
        ax.set_yscale("log")
    ax.set(xlabel="step", ylabel=label)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def _moving_average(values: np.ndarray, window: int) -> np.ndarray:
    window = min(window, values.size)
    return np.convolve(values, np.ones(window) / window, mode="valid")


def plot_rewards(methods: Methods, path: Path) -> None:
    """Reward over steps, smoothed over 5 steps; the band spans the seeds."""
    _curves(methods, "reward/mean", "mean reward (average of 5 steps)", path, log=False, window=5)


def plot_gap(methods: Methods, path: Path) -> None:
    """Mean absolute log-prob gap between trainer and rollout over steps, first minibatch after each sync."""
    _curves(methods, GAP, "mean |log-prob gap|", path, log=True)


def plot_mismatch(methods: Methods, path: Path) -> None:
    """Share of codes that differ from the rollout's, by layer and site, after guidance."""
    tables = {method: by_layer(runs, "code_mismatch") for method, runs in methods.items()}
    tables = {method: table for method, table in tables.items() if table}
    sites = sorted({site for table in tables.values() for site in table})
    if not sites:
        return
    fig, axes = plt.subplots(
        1, len(sites), figsize=(3.2 * len(sites), 3.2), sharey=True, constrained_layout=True
    )
    for ax, site in zip(np.atleast_1d(axes), sites, strict=True):
        for method, table in tables.items():
            if site in table:
                ax.plot(
                    range(len(table[site])), 100 * np.asarray(table[site]), marker="o", ms=3, label=method
                )
        ax.set(title=site, xlabel="layer")
        ax.set_yscale("symlog", linthresh=0.01)
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("codes that differ, %")
    np.atleast_1d(axes)[-1].legend(fontsize=7)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def save_figures(methods: Methods, folder: Path) -> list[Path]:
    """Writes `rewards.png`, `logprob_gap.png` and, where codes were audited, `mismatch_by_layer.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, plot in (
        ("rewards", plot_rewards),
        ("logprob_gap", plot_gap),
        ("mismatch_by_layer", plot_mismatch),
    ):
        path = folder / f"{name}.png"
        plot(methods, path)
        if path.exists():
            drawn.append(path)
    return drawn
