"""How guidance ages: one rollout, many optimiser steps on it, and the gap after each.

Between syncs the trainer's weights move away from those that made the record. What the record still holds together,
and what pinning the experts' codes (`guide_weights`) adds, is measured here on frozen rollouts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.config import ConfigError
from trace_jax.data import prompt_iterator
from trace_jax.quant import rollout_weights
from trace_jax.rl.advantages import group_advantages
from trace_jax.rl.batch import make_batch
from trace_jax.rl.loop import Loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgeRow:
    """Figures after `age` optimiser steps on one rollout, over its sampled tokens, in nats.

    Attributes:
      gap, gap_p999, kl_k3: mean |log-prob gap| of trainer and rollout, its 99.9th percentile, and the k3 estimate.
      clipped_share: of the tokens, outside the clip interval.
      moved: mean |change| of the trainer's own log-probs since age 0.
      policy_moved: mean |change| of what a rollout of the updated weights says of the same tokens.
      fresh_gap: mean |gap| of the trainer and that rollout.
    """

    seed: int
    age: int
    gap: float
    gap_p999: float
    kl_k3: float
    clipped_share: float
    moved: float
    policy_moved: float
    fresh_gap: float


def age_rollout(loop: Loop, params: Any, seed: int, ages: Sequence[int]) -> list[AgeRow]:
    """Rolls out once from `params`, then takes `max(ages)` optimiser steps on that batch.

    Args:
        loop: of the method; `config.minibatches` must be 1, each step sees the whole batch.
        params: FP32 masters; left untouched.
        seed: of prompts and sampling.
        ages: increasing numbers of steps after which to measure.
    """
    if loop.config.minibatches != 1 or loop.accumulation != 1:
        raise ConfigError(
            "ageing needs rl.minibatches=1 and optimizer.accumulation=1: every step sees the whole batch."
        )
    loop.start(jax.tree.map(jnp.copy, params), seed)
    prompts = next(prompt_iterator(loop.task, loop.config.prompts, seed=seed))
    trajectories = loop.roll_out(prompts["prompts"])
    rewards = loop.rewards(prompts["problems"], trajectories)
    batch = make_batch(
        trajectories,
        group_advantages(rewards).values.reshape(-1),
        model=loop.model,
        spec=loop.spec,
        weight_version=0,
        replay_routes=loop.config.replay_routes,
    )
    guides = loop.weight_guides(0)
    mask, normalizer = batch.sampled, np.float32(batch.sampled.sum())
    sync = jax.jit(rollout_weights, static_argnums=(1, 2))

    def rescored():
        weights = sync(loop.train.params, loop.plan, loop.model.dtype)
        return loop.sampler.rescore(weights, trajectories)

    def mean_abs(x):
        return float(np.abs(np.where(mask, x, 0.0)).sum() / mask.sum())

    rows, first, first_policy = [], None, None
    for age in range(max(ages) + 1):
        if age == 0 or age in ages:
            mismatch, result = jax.device_get(loop.trainer.evaluate(loop.train.params, batch, guides))
            policy = rescored()
            first = result.logprobs if first is None else first
            first_policy = policy if first_policy is None else first_policy
            ratio = np.exp(np.where(mask, result.logprobs - batch.rollout_logprobs, 0.0))
            outside = (ratio < 1 - loop.config.clip_low) | (ratio > 1 + loop.config.clip_high)
            rows.append(
                AgeRow(
                    seed=seed,
                    age=age,
                    gap=float(mismatch["logprob_abs_diff_mean"]),
                    gap_p999=float(mismatch["logprob_abs_diff_p999"]),
                    kl_k3=float(mismatch["kl_k3"]),
                    clipped_share=float((outside & mask).sum() / mask.sum()),
                    moved=mean_abs(result.logprobs - first),
                    policy_moved=mean_abs(policy - first_policy),
                    fresh_gap=mean_abs(result.logprobs - policy),
                )
            )
        loop.train, _, _ = loop.trainer.step(loop.train, batch, normalizer, weight_guides=guides)
    return rows


def ageing_table(arms: dict[str, list[AgeRow]]) -> str:
    """Markdown: one line per arm and age, means over the seeds."""
    fields = [f.name for f in dataclasses.fields(AgeRow) if f.name not in ("seed", "age")]
    lines = ["| arm | steps | " + " | ".join(fields) + " |", "|" + "---|" * (len(fields) + 2)]
    for arm, rows in arms.items():
        for age in sorted({row.age for row in rows}):
            cells = [f"{np.mean([getattr(row, f) for row in rows if row.age == age]):.3g}" for f in fields]
            lines.append(f"| {arm} | {age} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
