"""What kernels change: rollouts by kernels beside rollouts by the reference, trained on by the same XLA programs.

    python -m experiments.kernel_gap init_from=runs/compare/warmstart

Both sample with the same weights, prompts and keys. Shown per method: seconds of a rollout and of a train step either
way, in turns; the log-prob gap between trainer and rollout, either way; and between the two rollouts, over the tokens
that they have in common, their own gap and the share of recorded bits that differ, by layer.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import hydra
import jax
import numpy as np
from omegaconf import DictConfig

from experiments.bench import BenchConfig, Subject, default_config
from experiments.bench_train import TrainStep
from experiments.common import CONFIGS, enable_compilation_cache, script
from experiments.pairs import seconds
from kernels_pallas.implementations import default_implementation
from trace_jax.config import from_mapping
from trace_jax.rollout import Trajectories
from trace_jax.runs import describe_environment

SIDES = ("kernels", "reference")


def choice(side: str) -> contextlib.AbstractContextManager:
    """What a side's programs are called under."""
    return default_implementation("reference" if side == "reference" else None)


class Side:
    """One method with kernels, or by the reference."""

    def __init__(self, config: BenchConfig, method: str, side: str):
        self.side = side
        with choice(side):
            self.subject = Subject(config, method)
            self.subject.rollout()
            self.step = TrainStep(self.subject)
            self.trajectories: Trajectories = self.step.trajectories
            self.step()()
            batch = self.step.batch.to_device()
            mismatch, _ = self.subject.loop.trainer.evaluate(self.subject.loop.train.params, batch)
        self.gap = {name: float(value) for name, value in jax.device_get(mismatch).items()}

    def time(self, repeats: int) -> tuple[list[float], list[float]]:
        with choice(self.side):
            rollouts = [seconds(self.subject.rollout) for _ in range(repeats)]
            return rollouts, [seconds(self.step()) for _ in range(repeats)]


def compare(a: Trajectories, b: Trajectories) -> dict[str, Any]:
    """Over the positions before the first token that differs: log-prob gap, and differing recorded bits by layer."""
    same = np.cumprod(a.tokens == b.tokens, axis=1).astype(bool)
    sampled = same & a.sampled & b.sampled
    result: dict[str, Any] = {
        "tokens in common": round(float(sampled.sum() / a.sampled.sum()), 4),
        "gap": float(np.abs(a.logprobs - b.logprobs)[sampled].mean()),
    }
    # A row's record depends on the tokens up to it.
    rows = same & a.fed & b.fed
    for site, record in a.record.sites.items():
        bits, others = (np.asarray(r.mantissa) for r in (record, b.record.sites[site]))
        differ = np.unpackbits(bits ^ others, axis=-1).reshape(*bits.shape[:3], -1)
        result[f"bits that differ, {site}"] = [round(float(layer[rows].mean()), 5) for layer in differ]
    return result


@hydra.main(config_path=CONFIGS, config_name=default_config(), version_base="1.3")
@script
def main(config: DictConfig) -> None:
    bench = from_mapping(BenchConfig, config)
    enable_compilation_cache(bench.out)
    rows = {}
    for method in (bench.baseline, *bench.methods):
        sides = {side: Side(bench, method, side) for side in SIDES}
        times: dict[str, list[list[float]]] = {side: [[], []] for side in SIDES}
        for _ in range(3):
            for side, program in sides.items():
                for total, new in zip(times[side], program.time(max(1, bench.pairs // 3)), strict=True):
                    total += new
        rows[method] = {
            side: {
                "rollout, s": round(float(np.median(times[side][0])), 4),
                "train step, s": round(float(np.median(times[side][1])), 4),
                "trainer to rollout": {k: sides[side].gap[k] for k in ("logprob_abs_diff_mean", "kl_k3")},
            }
            for side in SIDES
        }
        both = [sides[side].trajectories for side in SIDES]
        rows[method]["between the rollouts"] = compare(*both)
        print(method, json.dumps(rows[method]), flush=True)
    out = Path(bench.out)
    out.mkdir(parents=True, exist_ok=True)
    result = {"environment": describe_environment(), "config": dataclasses.asdict(bench), "methods": rows}
    (out / "kernel_gap.json").write_text(json.dumps(result, indent=1, default=str))
    print(table(rows))


def table(rows: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| method | rollout by kernels, s | by the reference, s | train step with kernels, s | without, s "
        "| trainer to kernels | trainer to reference | between the rollouts | tokens in common |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, row in rows.items():
        kernels, reference, both = (row[name] for name in (*SIDES, "between the rollouts"))
        cells = [
            method,
            *(side[f"{what}, s"] for what in ("rollout", "train step") for side in (kernels, reference)),
        ]
        cells += [
            f"{side['trainer to rollout']['logprob_abs_diff_mean']:.2e}" for side in (kernels, reference)
        ]
        lines.append(
            "| " + " | ".join(map(str, [*cells, f"{both['gap']:.2e}", both["tokens in common"]])) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
