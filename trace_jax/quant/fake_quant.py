"""Straight-through rounding: the forward value is rounded, the gradient passes as if it were not."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


@jax.custom_vjp
def straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns `rounded` in the dtype of `x`; the cotangent goes to `x` unchanged (identity, no clip mask).

    `x + stop_gradient(rounded - x)` would add two roundings of its own, so the value would not be the FP4 value bit
    for bit. Guidance reaches `rounded` as data and takes no gradient.
    """
    return rounded.astype(x.dtype)


def _straight_through_fwd(x, rounded):
    return straight_through(x, rounded), None


def _straight_through_bwd(_, cotangent):
    return cotangent, None


straight_through.defvjp(_straight_through_fwd, _straight_through_bwd)


def cast_weight(w: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Master weight in the compute dtype, rounded where the compiler may not drop it.

    XLA removes f32 -> bf16 -> f32 pairs on CPU and GPU: a plain cast would let the trainer multiply with unrounded
    masters while the rollout holds BF16 copies.
    """
    if w.dtype == jnp.dtype(dtype):
        return w
    if jnp.dtype(dtype) == jnp.bfloat16:
        rounded = lax.reduce_precision(lax.stop_gradient(w), exponent_bits=8, mantissa_bits=7)
        w = straight_through(w, rounded)
    return w.astype(dtype)
