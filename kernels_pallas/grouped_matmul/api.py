"""Matmul of rows grouped by expert with that expert's weights, and what follows it in one pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from kernels_pallas import triton_bridge
from kernels_pallas.activations import Activation, check_activation
from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.grouped_matmul import pallas_tpu, reference, triton
from kernels_pallas.implementations import Implementation, chooses_kernels, select
from kernels_pallas.matmul.api import check_dtypes, check_operand
from kernels_pallas.tiled import TiledFp4Array, tile


def arranged(w: Float[Array, "l *matrices k n"] | Fp4Array | TiledFp4Array | Stacked, *, gated: bool) -> Any:
    """Matrices stacked over layers as this machine's kernel reads them, a copy for as long as they are used.

    On one NVIDIA GPU packed matrices are tiled, and BF16 ones come as a `Stacked` whose layer is to be replaced, which
    says that a layer is not to be cut out. Elsewhere, and once they are arranged, they are returned as they are.

    `gated`: the columns are a gate's, then those of an up projection.
    """
    if isinstance(w, TiledFp4Array | Stacked):
        return w
    if not chooses_kernels("gpu") or triton_bridge.unavailable() is not None:
        return w
    return _tiled_layers(w, gated) if isinstance(w, Fp4Array) else Stacked(w, jnp.int32(0))


@functools.partial(jax.jit, static_argnums=1)
def _tiled_layers(w: Fp4Array, gated: bool) -> TiledFp4Array:
    return lax.map(functools.partial(tile, gated=gated), w)  # a layer at a time: copies are made on the way


def _of_a_trainer(
    x: Any, w: Any, group_sizes: Any, bias: Any = None, *, activation: Activation | None = None
) -> str | None:
    """Why a kernel is not chosen by itself."""
    if isinstance(w, Stacked | Fp4Array | TiledFp4Array):
        return None
    return "matrices in BF16, outside a stack, are a trainer's, and XLA's, gradients included"


IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(
        run=pallas_tpu.grouped_matmul, refusal=pallas_tpu.refusal, platform="tpu", deference=_of_a_trainer
    ),
    "triton": Implementation(
        run=triton.grouped_matmul, refusal=triton.refusal, platform="gpu", deference=_of_a_trainer
    ),
    "reference": Implementation(run=reference.grouped_matmul),
}


def _check_bias(bias: Any, x: Any, w: Any) -> None:
    allowed = {"bfloat16", "float32"} | {
        a.dtype.name for a in (x, w) if getattr(a, "dtype", None) == jnp.float64
    }
    if bias.dtype.name not in allowed:
        raise TypeError(f"bias is {bias.dtype}; expected one of {sorted(allowed)}")
    if bias.shape != (w.shape[-3], w.shape[-1]):
        raise ValueError(
            f"bias has shape {bias.shape}; expected {(w.shape[-3], w.shape[-1])}, a row per expert of w"
        )


def grouped_matmul(
    x: Shaped[Array, "..."] | Fp4Array,
    w: Shaped[Array, "..."] | Fp4Array | TiledFp4Array | Stacked,
    group_sizes: Shaped[Array, "..."],
    *,
    bias: Shaped[Array, "..."] | None = None,
    activation: Activation | None = None,
    implementation: str | None = None,
) -> Float[Array, "r f"]:
    """Rows of x [R, K], sorted by group, each times its group's matrix of w [E, K, N], accumulated in FP32.

    Args:
      x: bfloat16, float32 or float64 array, or an Fp4Array along axis -1.
      w: an array of the dtype of `x`, or an Fp4Array along axis -2, or tiled; or one layer of a stack of
        them. In kernels a row's result does not depend on the rows beside it.
      group_sizes: int32 [E], rows of each group; groups may be empty. Their sum must not exceed R.
      bias: bfloat16 or float32 [E, N] (or float64 with such operands); its row of a group is added to the group's
        accumulators, after the row scales of FP4 operands and before the activation.
      activation: w is [E, K, 2F], the columns of a gate, then those of an up projection, and the result is [R, F],
        computed in FP32: with "swiglu" silu(gate) * up (arXiv 2002.05202), or as a `ClampedSwiglu` says.

    Returns:
      float32 [R, N] (float64 for float64 operands); zeros for rows past the sum of `group_sizes`. A NaN in
      one group's rows, weights or biases leaves all other rows, and other groups' gradients, bitwise unchanged.
      Differentiable in array operands: the cotangent is cast to their dtype before the backward GEMMs, which
      accumulate in FP32. The gradient of a bias is summed in FP32, in an order that follows from `group_sizes`.

    Raises:
      TypeError for operands of different or unsupported dtypes, ValueError for shapes that do not fit.
    """
    check_operand("x", x, -1)
    matrices = w
    if isinstance(w, Stacked):
        w.check()
        matrices = w.array
    check_operand("w", matrices, -2)
    check_dtypes(x, matrices)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"cannot multiply x {x.shape} by w {w.shape}; expected [R, K] and [E, K, N]")
    if w.shape[0] == 0:
        raise ValueError(f"w has shape {w.shape}: no experts; expected at least one")
    if group_sizes.dtype != jnp.int32:
        raise TypeError(f"group_sizes is {group_sizes.dtype}; expected int32")
    if group_sizes.shape != w.shape[:1]:
        raise ValueError(
            f"group_sizes has shape {group_sizes.shape}; expected {w.shape[:1]}, one size per expert of w"
        )
    if activation is not None:
        check_activation(activation, w.shape)
    if bias is not None:
        _check_bias(bias, x, matrices)
    arguments, options = (x, w, group_sizes, bias), {"activation": activation}
    run = select("grouped_matmul", implementation, IMPLEMENTATIONS, *arguments, **options)
    return run(*arguments, **options)
