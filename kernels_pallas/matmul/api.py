"""Matmul of BF16 and FP4 operands."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.implementations import Implementation, select
from kernels_pallas.matmul import pallas_tpu, reference, triton
from kernels_pallas.tiled import TiledFp4Array

IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(run=pallas_tpu.matmul, refusal=pallas_tpu.refusal, platform="tpu"),
    "triton": Implementation(run=triton.matmul, refusal=triton.refusal, platform="gpu"),
    "reference": Implementation(run=reference.matmul),
}
MODES = ("fast", "invariant")


def matmul(
    x: Shaped[Array, "..."] | Fp4Array,
    w: Shaped[Array, "..."] | Fp4Array | TiledFp4Array | Stacked,
    *,
    mode: str = "invariant",
    implementation: str | None = None,
) -> Float[Array, "..."]:
    """x [..., K] times w [K, N], accumulated in FP32.

    Args:
      x: bfloat16, float32 or float64 array, or an Fp4Array along axis -1.
      w: an array of the dtype of `x`, or an Fp4Array along axis -2 (its row one matrix, or one column), or tiled; or
        one layer of a stack of arrays.
      mode: of kernels: "invariant", a row's result does not depend on how many rows there are, or "fast". What XLA
        compiles promises neither.

    An FP4 operand enters as code x block scale, exact in BF16; its power-of-two row scale multiplies the
    accumulator.

    Returns:
      float32 [..., N] (float64 for float64 operands). Differentiable in array operands: the cotangent is cast
      to their dtype before both backward GEMMs, which accumulate in FP32.

    Raises:
      TypeError for operands of different or unsupported dtypes, ValueError for shapes that do not fit.
    """
    check_operand("x", x, -1)
    matrix = w
    if isinstance(w, Stacked):
        w.check()
        matrix = w.array
        if isinstance(matrix, Fp4Array | TiledFp4Array):
            raise TypeError(
                "w is a layer of an FP4 stack; expected a stack of arrays: slice it, or use grouped_matmul"
            )
    check_operand("w", matrix, -2)
    check_dtypes(x, matrix)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"cannot multiply x {x.shape} by w {w.shape}; expected [..., K] and [K, N]")
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; expected one of {MODES}")
    return select("matmul", implementation, IMPLEMENTATIONS, x, w, mode=mode)(x, w, mode=mode)


def check_operand(name: str, a: Shaped[Array, "..."] | Fp4Array | TiledFp4Array, axis: int) -> None:
    """Raise unless `a` is a float array, an Fp4Array along `axis`, or tiled."""
    if isinstance(a, TiledFp4Array):
        return
    if isinstance(a, Fp4Array):
        a.check()
        if a.axis != axis:
            raise ValueError(f"{name} is FP4 along axis {a.axis}; expected axis {axis}, the contraction axis")
    elif a.dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(f"{name} is {a.dtype}; expected bfloat16, float32, float64 or an Fp4Array")


def check_dtypes(
    x: Shaped[Array, "..."] | Fp4Array, w: Shaped[Array, "..."] | Fp4Array | TiledFp4Array
) -> None:
    """TypeError for two arrays of different dtypes."""
    if not any(isinstance(a, Fp4Array | TiledFp4Array) for a in (x, w)) and x.dtype != w.dtype:
        raise TypeError(f"x is {x.dtype} and w is {w.dtype}; expected one dtype: cast one of them")
