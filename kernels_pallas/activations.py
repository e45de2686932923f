"""Activations of a gate and an up projection: what follows the accumulators of a GEMM, in their dtype."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS = ("swiglu",)
"""Those without parameters, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), gate at most `limit` and |up| at most `limit` (arXiv 2508.10925).

    Attributes:
      alpha: gpt-oss has 1.702, with which gate * sigmoid(alpha * gate) is close to GELU.
      limit: positive; gpt-oss has 7.
    """

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha is {self.alpha}; expected a finite number")
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise ValueError(f"limit is {self.limit}; expected a positive number")


Activation = str | ClampedSwiglu


def check_activation(activation: Activation, shape: tuple[int, ...]) -> None:
    """ValueError unless `activation` is one, and weights of this shape have as many columns as it takes."""
    if activation not in ACTIVATIONS and not isinstance(activation, ClampedSwiglu):
        raise ValueError(
            f"unknown activation {activation!r}; expected None or one of {ACTIVATIONS}, or a ClampedSwiglu"
        )
    if shape[-1] % 2:
        raise ValueError(f"w has shape {shape}; {activation} needs gate and up columns, an even number")


def gated(activation: Activation, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """An activation of a gate and an up projection; also inside Pallas kernels."""
    if not isinstance(activation, ClampedSwiglu):
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(gate, activation.limit)
    up = jnp.clip(up, -activation.limit, activation.limit)
    return (up + 1) * gate * jax.nn.sigmoid(activation.alpha * gate)


def activated(out: Float[Array, "*rows n"], activation: Activation | None) -> Float[Array, "*rows _"]:
    """An activation of columns of a gate, then as many of an up projection; None: the columns."""
    return out if activation is None else gated(activation, *jnp.split(out, 2, axis=-1))
