"""The optimiser, from Optax."""

from typing import Any

import jax
import optax

from trace_jax.rl.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW with warm-up and schedule, clipped by global norm; accumulates gradients over microbatches.

    Args:
        config: hyperparameters.
        total_steps: optimiser steps of the whole run; `linear` and `cosine` reach 0 there.
    """
    rate, warmup = config.learning_rate, config.warmup_steps
    after = max(total_steps - warmup, 1)
    body = {
        "constant": optax.constant_schedule(rate),
        "linear": optax.linear_schedule(rate, 0.0, after),
        "cosine": optax.cosine_decay_schedule(rate, after),
    }[config.schedule]
    schedule = (
        optax.join_schedules([optax.linear_schedule(0.0, rate, warmup), body], [warmup]) if warmup else body
    )
    optimizer = optax.adamw(
        schedule, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=_decayed
    )
    if config.clip_norm > 0:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    if config.accumulation > 1:
        optimizer = optax.MultiSteps(optimizer, config.accumulation).gradient_transformation()
    return optimizer


def _decayed(params: Any) -> Any:
    """All but a correction of the router's choice: it has no gradient, and decay alone would wear it off."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "router_correction" not in jax.tree_util.keystr(path), params
    )
