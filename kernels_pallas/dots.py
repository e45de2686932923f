"""The one contraction that all GEMMs here are made of: FP32 accumulation, forward and backward."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float64 for float64 operands, else float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _contract(spec: str, x: Array, y: Array, dtype: DTypeLike | None) -> Array:
    dtype = x.dtype if dtype is None else dtype
    return jnp.einsum(
        spec, x.astype(dtype), y.astype(dtype), preferred_element_type=accumulator_dtype(jnp.dtype(dtype))
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def einsum(
    spec: str, x: Float[Array, "..."], y: Float[Array, "..."], dtype: DTypeLike | None = None
) -> Float[Array, "..."]:
    """`jnp.einsum` of two operands of one dtype, accumulated and returned in FP32 (FP64 for float64).

    Backward, the cotangent is cast to the operands' dtype first, so that both backward GEMMs have (BF16)
    operands of the same kind as the forward one, and accumulates in FP32; without that the cotangent's GEMMs
    would run in FP32. Every index of an operand must occur in the other operand or in the result.

    `dtype`, if stated, is that of the GEMMs' operands, to which x and y are cast. Gradients keep the dtypes of x and y:
    those of wider ones are not rounded, so that they can be added up first.
    """
    return _contract(spec, x, y, dtype)


def _forward(spec, x, y, dtype):
    return _contract(spec, x, y, dtype), (x, y)


def _backward(spec, dtype, residuals, g):
    x, y = residuals
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    dtype = x.dtype if dtype is None else dtype
    g = g.astype(dtype)
    dx = _contract(f"{out},{right}->{left}", g, y, dtype)
    dy = _contract(f"{left},{out}->{right}", x, g, dtype)
    return dx.astype(x.dtype), dy.astype(y.dtype)


einsum.defvjp(_forward, _backward)
