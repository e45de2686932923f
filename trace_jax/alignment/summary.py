"""From the metrics of runs to one table: means with bootstrap intervals over seeds and steps."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Rows = Sequence[dict[str, Any]]

GAP = "mismatch/logprob_abs_diff_mean"
RESAMPLES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A statistic and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class ReportError(ValueError):
    """Runs that cannot be reported; the message says which and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run: `rows` one dict of metrics per step, of `planned` steps; `scores` of the final policy by precision."""

    method: str
    seed: int
    rows: Rows
    planned: int
    scores: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not self.rows:
            raise ReportError(
                f"run {self.method!r} (seed {self.seed}) has no complete step; leave it out or train it."
            )

    @property
    def unfinished(self) -> str:
        """What to call a run that stopped early, or nothing."""
        done = len(self.rows)
        return "" if done >= self.planned else f"seed {self.seed}: {done} of {self.planned} steps"


def series(run: Run, name: str) -> np.ndarray:
    """float64 values of one metric over the steps that logged it."""
    return np.asarray([row[name] for row in run.rows if isinstance(row.get(name), int | float)], np.float64)


def layer_means(run: Run, name: str) -> np.ndarray:
    """float64 per step, the mean over layers of a metric logged as one value per layer."""
    values = [row[name] for row in run.rows if isinstance(row.get(name), list)]
    return np.asarray(values, np.float64).mean(axis=1) if values else np.zeros(0)


def bootstrap(
    samples: Sequence[Sequence[np.ndarray]], statistic: Callable[..., float], *, seed: int = 0
) -> Estimate | None:
    """95 % percentile interval of `statistic(mean of group 1, mean of group 2, ...)`.

    Two-level resampling (Davison and Hinkley 1997, section 3.8): seeds with replacement, then steps within a seed,
    since steps of one run are no independent runs.

    Args:
        samples: per group, one array of per-step values for each seed.
        statistic: of the groups' means.

    Returns:
        None if a group has no values, or the statistic no finite value.
    """
    groups = [[s for s in group if s.size] for group in samples]
    if not all(groups):
        return None
    rng = np.random.default_rng(seed)

    def resampled_mean(group):
        chosen = (group[i] for i in rng.integers(len(group), size=len(group)))
        return np.mean([rng.choice(s, size=s.size).mean() for s in chosen])

    draws = [statistic(*(resampled_mean(group) for group in groups)) for _ in range(RESAMPLES)]
    low, high = np.quantile(draws, [0.025, 0.975])
    value = statistic(*(np.mean([s.mean() for s in group]) for group in groups))
    estimate = Estimate(value=float(value), low=float(low), high=float(high))
    return estimate if np.isfinite(dataclasses.astuple(estimate)).all() else None


def mean_of(runs: Sequence[Run], name: str) -> Estimate | None:
    return bootstrap([[series(run, name) for run in runs]], lambda mean: mean)


def ratio_of(runs: Sequence[Run], others: Sequence[Run], name: str) -> Estimate | None:
    """Mean of a metric over `runs` divided by its mean over `others`; None where that is 0."""
    pick = layer_means if name.startswith("alignment_by_layer/") else series
    groups = [[pick(run, name) for run in group] for group in (runs, others)]
    return bootstrap(groups, lambda a, b: a / b if b else float("nan"))


def edge_rewards(run: Run, share: float = 0.1) -> tuple[float, float]:
    """Mean reward of the first and of the last `share` of the steps (at least 3 steps each)."""
    rewards = series(run, "reward/mean")
    if rewards.size != len(run.rows) or not np.isfinite(rewards).all():
        raise ReportError(
            f"run {run.method!r} (seed {run.seed}) has steps without a reward; its metrics are damaged."
        )
    count = min(max(int(share * rewards.size), 3), rewards.size)
    return float(rewards[:count].mean()), float(rewards[-count:].mean())


def code_metric(runs: Sequence[Run], metric: str, sites: Sequence[str]) -> Estimate | None:
    """Mean over steps, layers and `sites` of an alignment metric."""
    arrays = []
    for run in runs:
        columns = [series(run, f"alignment/{site}/{metric}") for site in sites]
        columns = [c for c in columns if c.size]
        if columns:
            arrays.append(np.mean(columns, axis=0))
    return bootstrap([arrays], lambda mean: mean) if arrays else None


def summarize(runs: Sequence[Run], sites: Sequence[str] = ("expert_input", "key", "value")) -> dict[str, Any]:
    """Everything the comparison reports about one method, JSON-ready."""

    def plain(estimate: Estimate | None) -> dict[str, float] | None:
        return None if estimate is None else dataclasses.asdict(estimate)

    edges = np.asarray([edge_rewards(run) for run in runs])
    precisions = sorted({p for run in runs for p in run.scores})
    return {
        "seeds": [run.seed for run in runs],
        "steps": max(len(run.rows) for run in runs),
        "unfinished": [run.unfinished for run in runs if run.unfinished],
        "reward_first": over_seeds(edges[:, 0]),
        "reward_last": over_seeds(edges[:, 1]),
        "scores": {p: over_seeds([run.scores[p] for run in runs if p in run.scores]) for p in precisions},
        "mismatch": {
            name: plain(mean_of(runs, f"mismatch/{name}"))
            for name in (
                "logprob_abs_diff_mean",
                "logprob_abs_diff_p999",
                "logprob_abs_diff_max",
                "kl_k1",
                "kl_k3",
                "ess",
            )
        },
        "codes": {
            name: plain(code_metric(runs, name, sites))
            for name in ("d_act", "d_act_before", "code_mismatch", "code_mismatch_before", "adjacent_share")
        },
        "code_mismatch_by_layer": by_layer(runs, "code_mismatch"),
        "code_mismatch_before_by_layer": by_layer(runs, "code_mismatch_before"),
        "bytes_per_token": plain(mean_of(runs, "guidance/bytes_per_token")),
        "route_bytes_per_token": plain(mean_of(runs, "routes/bytes_per_token")),
        "is_clipped_share": plain(mean_of(runs, "is/clipped_share")),
        "gap_by_age": gap_by_age(runs),
        "alarms": float(sum(series(run, "guidance/alarm").sum() for run in runs)),
        # The first step compiles; medians leave it out.
        "seconds": {
            phase: float(np.median(np.concatenate([series(run, f"time/{phase}")[1:] for run in runs])))
            for phase in ("rollout", "train", "sync")
            if any(series(run, f"time/{phase}").size > 1 for run in runs)
        },
    }


def gap_by_age(runs: Sequence[Run]) -> dict[str, float]:
    """Mean log-prob gap by optimiser steps since the rollout, where there are several minibatches."""
    names = sorted({name for run in runs for row in run.rows for name in row if name.endswith(f"/{GAP}")})
    ages = [name for name in names if name.startswith("age_")]
    return {
        name.split("/")[0].removeprefix("age_"): float(np.mean([series(run, name).mean() for run in runs]))
        for name in ages
    }


def over_seeds(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """Mean and sample standard deviation; one seed has none."""
    return {
        "mean": float(np.mean(values)),
        "spread": float(np.std(values, ddof=1)) if len(values) > 1 else None,
    }


def by_layer(runs: Sequence[Run], metric: str) -> dict[str, list[float]]:
    """Per site, the metric of every layer, averaged over steps and seeds."""
    result = {}
    for site in ("expert_input", "down_input", "key", "value"):
        name = f"alignment_by_layer/{site}/{metric}"
        values = [row[name] for run in runs for row in run.rows if isinstance(row.get(name), list)]
        if values:
            result[site] = np.mean(values, axis=0).tolist()
    return result


def against(
    methods: dict[str, Sequence[Run]], yardstick: str = "bf16", baseline: str = "qat"
) -> dict[str, dict[str, Any]]:
    """Ratios of every method to plain QAT and to BF16's gap to its own rollout, with intervals."""
    result: dict[str, dict[str, Any]] = {}
    for name, runs in methods.items():
        row = {}
        if baseline in methods and name != baseline:
            row[f"gap_over_{baseline}"] = ratio_of(runs, methods[baseline], GAP)
            for site in ("expert_input", "key", "value", "down_input"):
                metric = f"alignment_by_layer/{site}/code_mismatch"
                row[f"code_mismatch_over_{baseline}/{site}"] = ratio_of(runs, methods[baseline], metric)
        if yardstick in methods and name != yardstick:
            for metric in ("logprob_abs_diff_mean", "logprob_abs_diff_p999", "kl_k3"):
                row[f"{metric}_over_{yardstick}"] = ratio_of(runs, methods[yardstick], f"mismatch/{metric}")
        result[name] = {key: dataclasses.asdict(value) for key, value in row.items() if value is not None}
    return result


def markdown_table(summaries: dict[str, dict[str, Any]]) -> str:
    """The comparison as a Markdown table, one row per method."""
    header = (
        "method",
        "reward first -> last",
        "log-prob gap, mean [95 %]",
        "p99.9",
        "k3 KL",
        "D_act",
        "code mismatch before -> after",
        "record B/token",
        "rollout / train / sync s",
        "trained problems BF16",
        "NVFP4",
        "NVFP4 4/6",
        "held out BF16",
        "NVFP4",
    )
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for method, s in summaries.items():
        codes, mismatch = s["codes"], s["mismatch"]
        cells = (
            f"{method} (unfinished: {'; '.join(s['unfinished'])})" if s["unfinished"] else method,
            f"{_spread(s['reward_first'])} -> {_spread(s['reward_last'])}",
            _interval(mismatch["logprob_abs_diff_mean"]),
            _value(mismatch["logprob_abs_diff_p999"]),
            _value(mismatch["kl_k3"]),
            _value(codes["d_act"]),
            f"{_percent(codes['code_mismatch_before'])} -> {_percent(codes['code_mismatch'])}",
            _value(s["bytes_per_token"]),
            " / ".join(f"{s['seconds'][p]:.2f}" for p in ("rollout", "train", "sync") if p in s["seconds"])
            or "-",
            *(_spread(s["scores"].get(f"train_{p}")) for p in ("bf16", "nvfp4", "nvfp4_4over6")),
            *(_spread(s["scores"].get(f"held_out_{p}")) for p in ("bf16", "nvfp4")),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(value: dict[str, float] | None) -> str:
    if value is None:
        return "-"
    return f"{value['mean']:.3f}" + ("" if value["spread"] is None else f" ± {value['spread']:.3f}")


def _value(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['value']:.3g}"


def _interval(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['value']:.3g} [{value['low']:.3g}, {value['high']:.3g}]"


def _percent(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{100 * value['value']:.3g} %"
