"""Round the trainer's values under a record of the rollout's rounding."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped, UInt8

from kernels_pallas import formats
from kernels_pallas.arrays import Fp4Codes, check_axis, check_block
from kernels_pallas.formats import Fp4Format
from kernels_pallas.guided_round import pallas_tpu, reference, triton
from kernels_pallas.guided_round.guide import Guide
from kernels_pallas.implementations import Implementation, select

IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(run=pallas_tpu.guided_round, refusal=pallas_tpu.refusal, platform="tpu"),
    "reference": Implementation(run=reference.guided_round),
}
VALUES_IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(
        run=pallas_tpu.guided_values, refusal=pallas_tpu.row_refusal, platform="tpu"
    ),
    "triton": Implementation(run=triton.guided_values, refusal=triton.values_refusal, platform="gpu"),
    "reference": Implementation(run=reference.guided_values),
}


def guided_round(
    x: Shaped[Array, "..."],
    guide: Guide,
    format: Fp4Format,
    *,
    axis: int = -1,
    row_axes: tuple[int, ...] = (-1,),
    implementation: str | None = None,
) -> Fp4Codes:
    """Round `x` to one of its two E2M1 neighbours under the rollout's scales, the one the record names.

    Let z = |x| / (scale x row scale) and lo, hi its neighbours (equal if z is on the grid or beyond 6). Mode
    "scale" takes the nearest (numeric contract, rule 3); "mantissa" the one whose low bit is the record's;
    "full" the one nearer the rollout's signed value. The sign is that of `x`.

    Args:
      x: bfloat16 or float32 [..., K] (axis -1) or [..., K, N] (axis -2).
      guide: the record, laid out like `x`.
      axis, row_axes: as in `quantize`.

    Returns:
      Codes with the scales and row exponents that were used, `axis` in place. A row that is not usable (see
      `usable_rows`) has nearest-even codes under its own scales; a block of `x` with NaN or Inf is poisoned.

    Raises:
      TypeError or ValueError for an input or record of the wrong dtype or shape.
    """
    check_axis(axis)
    guide.check(x.shape, format, axis, row_axes)
    options = {"axis": axis, "row_axes": row_axes}
    run = select("guided_round", implementation, IMPLEMENTATIONS, x, guide, format, **options)
    return run(x, guide, format, **options)


def guided_values(
    x: Shaped[Array, "..."], guide: Guide | None, format: Fp4Format, *, implementation: str | None = None
) -> Shaped[Array, "..."]:
    """The dequantized result of `guided_round`, of `quantize` without a guide: what a trainer multiplies.

    Args:
      x: bfloat16 or float32 [..., K], rows along the last axis.
      guide: the record, laid out like `x`, or None.

    Returns:
      Values [..., K] in the dtype of `x`, exact; NaN throughout a poisoned block. Rounding has no gradient of its own:
      pass `x` through `stop_gradient` and the gradient around it.

    Raises:
      TypeError or ValueError as `guided_round` and `quantize`.
    """
    if guide is None:
        check_block(x.shape[-1], -1, format)
    else:
        guide.check(x.shape, format, -1, (-1,))
    run = select("guided_values", implementation, VALUES_IMPLEMENTATIONS, x, guide, format)
    return run(x, guide, format)


def usable_rows(guide: Guide, format: Fp4Format, row_axes: tuple[int, ...] = (-1,)) -> Bool[Array, "..."]:
    """Rows that `guided_round` guides: valid, and without a poisoned scale byte."""
    return reference.usable_rows(guide, format, row_axes)


def own_scale_bytes(
    x: Shaped[Array, "..."], format: Fp4Format, row_exponent: UInt8[Array, "..."], *, axis: int = -1
) -> UInt8[Array, "..."]:
    """The scale bytes that `x` itself would get (rule 2) under given row exponents, such as the rollout's."""
    return reference.own_scale_bytes(x, format, row_exponent, axis=axis)


def compact_scales(scales: UInt8[Array, "..."], axis: int = -1) -> UInt8[Array, "..."]:
    """The two low bits of each scale byte, 4 blocks a byte; the last byte is filled up with zeros."""
    pad = [(0, 0)] * scales.ndim
    pad[axis] = (0, -scales.shape[axis] % 4)
    return formats.pack_two_bits(jnp.pad(scales & 3, pad), axis)


def expand_compact_scales(
    packed: UInt8[Array, "..."], own: UInt8[Array, "..."], format: Fp4Format, axis: int = -1
) -> UInt8[Array, "..."]:
    """Scale bytes from their two low bits and the trainer's own bytes t under the rollout's row scale.

    t + ((r - t + 1) mod 4) - 1, clipped to the bytes of finite blocks: right whenever t - 1 <= r <= t + 2.
    """
    return reference.expand_compact_scales(packed, own, format, axis)
