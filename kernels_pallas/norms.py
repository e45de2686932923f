"""RMSNorm, as models compute it and as kernels that quantize its result fuse it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.dots import accumulator_dtype


def rms_norm(x: Float[Array, "*rows k"], gain: Float[Array, " k"], eps: float) -> Float[Array, "*rows k"]:
    """x / sqrt(mean(x^2) + eps) * gain, in FP32 (FP64 for float64), returned in the dtype of x.

    `gain` is taken as it is: the caller rounds it as every weight that a rollout holds.
    """
    y = x.astype(accumulator_dtype(x.dtype))
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * gain.astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
