"""Quantize to FP4 and back."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Shaped, UInt8

from kernels_pallas.arrays import Fp4Array, Fp4Codes, check_axis, check_block, check_float
from kernels_pallas.formats import Fp4Format
from kernels_pallas.implementations import Implementation, select
from kernels_pallas.quantize import pallas_tpu, reference, triton

IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(run=pallas_tpu.quantize, refusal=pallas_tpu.refusal, platform="tpu"),
    "triton": Implementation(run=triton.quantize, refusal=triton.refusal, platform="gpu"),
    "reference": Implementation(run=reference.quantize),
}
RECORDED_IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(
        run=pallas_tpu.quantize_recorded, refusal=pallas_tpu.row_refusal, platform="tpu"
    ),
    "triton": Implementation(run=triton.quantize_recorded, refusal=triton.recorded_refusal, platform="gpu"),
    "reference": Implementation(run=reference.quantize_recorded),
}
NORM_IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(
        run=pallas_tpu.rms_norm_quantize, refusal=pallas_tpu.row_refusal, platform="tpu"
    ),
    "triton": Implementation(run=triton.rms_norm_quantize, refusal=triton.norm_refusal, platform="gpu"),
    "reference": Implementation(run=reference.rms_norm_quantize),
}
SCALE_RULES = ("amax", "4over6")


def _check(x: Array, format: Fp4Format, axis: int, row_axes: tuple[int, ...], scale_rule: str) -> None:
    if row_axes not in ((axis,), (-2, -1)):
        raise ValueError(f"row_axes {row_axes} with axis {axis}; expected ({axis},) or (-2, -1)")
    if x.ndim < max(-axis, len(row_axes)):
        raise ValueError(f"shape {x.shape} has too few axes for axis {axis} and row_axes {row_axes}")
    check_axis(axis)
    check_block(x.shape[axis], axis, format)
    if any(x.shape[i] == 0 for i in (axis, *row_axes)):
        raise ValueError(f"x has shape {x.shape}: a row has no values, hence no scale; expected some")
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"unknown scale_rule {scale_rule!r}; expected one of {SCALE_RULES}")
    if scale_rule == "4over6" and format.scale_dtype != "e4m3":
        raise ValueError(
            f"scale_rule '4over6' needs E4M3 scales; {format.name} has {format.scale_dtype}: use nvfp4"
        )


def quantize(
    x: Shaped[Array, "..."],
    format: Fp4Format,
    *,
    axis: int = -1,
    row_axes: tuple[int, ...] = (-1,),
    scale_rule: str = "amax",
    implementation: str | None = None,
) -> Fp4Array:
    """Round `x` to FP4 (numeric contract, rules 1 to 4).

    Args:
      x: bfloat16 or float32; rounded to BF16 first.
      axis: the contraction axis, in blocks of `format.block`: -1, or -2 for weights [..., K, N].
      row_axes: axes that share a row scale: (-1,) for one token or one (token, head), (-2, -1) for one
        matrix.
      scale_rule: "amax", or "4over6" (NVFP4, for evaluation): each block maps its maximum to 6 or to 4,
        whichever gives the lower squared error (a tie keeps 6), with block scales up to 256 when mapped to 6.

    Returns:
      The packed tensor. A block with NaN or Inf has the NaN scale byte and codes 0.

    Raises:
      TypeError: other dtypes. ValueError: a size that is no whole number of blocks, an unknown option.
    """
    _check(x, format, axis, row_axes, scale_rule)
    options = {"axis": axis, "row_axes": row_axes, "scale_rule": scale_rule}
    return select("quantize", implementation, IMPLEMENTATIONS, x, format, **options)(x, format, **options)


def quantize_recorded(
    x: Shaped[Array, "..."], format: Fp4Format, *, implementation: str | None = None
) -> tuple[Fp4Array, UInt8[Array, "..."]]:
    """`quantize` of rows along the last axis, and what a record keeps of the codes.

    Args:
      x: bfloat16 or float32 [..., K].

    Returns:
      The packed tensor, and the low (mantissa) bits of its codes as uint8 [..., K / 8], bit i of a byte for value i.

    Raises:
      TypeError or ValueError as `quantize`.
    """
    _check(x, format, -1, (-1,), "amax")
    run = select("quantize_recorded", implementation, RECORDED_IMPLEMENTATIONS, x, format)
    return run(x, format)


def rms_norm_quantize(
    x: Shaped[Array, "..."],
    gain: Shaped[Array, "..."],
    eps: float,
    format: Fp4Format,
    *,
    implementation: str | None = None,
) -> tuple[BFloat16[Array, "..."], Fp4Array, UInt8[Array, "..."]]:
    """RMSNorm, and its BF16 result quantized: what feeds the experts of a rollout.

    Args:
      x: bfloat16 or float32 [..., K], the residual stream.
      gain: float [K], already rounded to BF16.
      eps: added to the mean square.

    Returns:
      h = x / sqrt(mean(x^2) + eps) * gain, computed in FP32 and rounded to BF16 (`norms.rms_norm`); h packed in FP4;
      the low bits of its codes, as in `quantize_recorded`. Forward only.

    Raises:
      TypeError or ValueError as `quantize`, and for a gain that does not fit.
    """
    _check(x, format, -1, (-1,), "amax")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"x is {x.dtype}; expected bfloat16 or float32")
    check_float("gain", gain)
    if gain.shape != x.shape[-1:]:
        raise ValueError(f"gain has shape {gain.shape}; expected {x.shape[-1:]}, one value per column of x")
    run = select("rms_norm_quantize", implementation, NORM_IMPLEMENTATIONS, x, gain, eps, format)
    return run(x, gain, eps, format)


def quantize_codes(
    x: Shaped[Array, "..."],
    format: Fp4Format,
    *,
    axis: int = -1,
    row_axes: tuple[int, ...] = (-1,),
    scale_rule: str = "amax",
) -> Fp4Codes:
    """`quantize` with one byte per code, `axis` left in place: fuses into the arithmetic around it."""
    _check(x, format, axis, row_axes, scale_rule)
    return reference.quantize_codes(x, format, axis=axis, row_axes=row_axes, scale_rule=scale_rule)


def operand(a: Fp4Array | Fp4Codes) -> Float[Array, "..."]:
    """code x block scale in BF16 (exact: at most 6 significant bits), without row scale: a GEMM operand."""
    a.check()
    return reference.operand(a)


def dequantize(a: Fp4Array | Fp4Codes, dtype: DTypeLike = jnp.bfloat16) -> Float[Array, "..."]:
    """code x block scale x row scale, exact in BF16 and wider; NaN throughout a poisoned block."""
    a.check()
    return reference.dequantize(a, dtype)
