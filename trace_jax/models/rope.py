"""Rotary position embedding."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.config import check_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    theta: float = 10_000.0
    dim: int | None = None

    def __post_init__(self):
        check_range("model.rope", self, "theta", above=0)


def rope(
    x: Float[Array, "B T heads d"], positions: Int[Array, "B T"], config: RopeConfig
) -> Float[Array, "B T heads d"]:
    half = x.shape[-1] // 2
    acc = jnp.promote_types(x.dtype, jnp.float32)
    frequency = config.theta ** (-jnp.arange(half, dtype=acc) / half)
    angle = positions.astype(acc)[..., None, None] * frequency.reshape(1, 1, 1, half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x[..., :half].astype(acc), x[..., half:].astype(acc)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
