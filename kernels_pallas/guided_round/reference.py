"""Guided rounding in plain JAX: the definition that every other implementation is compared with."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped, UInt8

from kernels_pallas import formats
from kernels_pallas.arrays import Fp4Codes
from kernels_pallas.blocks import BlockCodes, Blocks, own_scales, scaled, split_blocks, threshold_scales
from kernels_pallas.formats import Fp4Format
from kernels_pallas.guided_round.guide import Guide
from kernels_pallas.quantize.reference import dequantize, own_row_exponent, quantize_codes


def guided_round(
    x: Shaped[Array, "..."],
    guide: Guide,
    format: Fp4Format,
    *,
    axis: int = -1,
    row_axes: tuple[int, ...] = (-1,),
) -> Fp4Codes:
    """See `api.guided_round`."""
    blocks = split_blocks(x, format, axis)
    scales = guide.scales.astype(jnp.int32)
    if guide.compact:
        scales = _low_bits(guide.scales, blocks.amax.shape[axis], axis)
    record = None
    if guide.mode == "mantissa":
        record = formats.unpack_bits(guide.mantissa, axis)
    elif guide.mode == "full":
        record = formats.unpack_codes(guide.words, axis)
    return guided_blocks(
        blocks,
        format,
        row_axes,
        usable=usable_rows(guide, format, row_axes),
        row_exponent=guide.row_exponent.astype(jnp.int32),
        scales=scales,
        record=None if record is None else record.astype(jnp.int32).reshape(blocks.magnitude.shape),
        mode=guide.mode,
        compact=guide.compact,
    ).stored(blocks, format)


def guided_values(x: Shaped[Array, "..."], guide: Guide | None, format: Fp4Format) -> Shaped[Array, "..."]:
    """See `api.guided_values`."""
    codes = quantize_codes(x, format) if guide is None else guided_round(x, guide, format)
    return dequantize(codes, x.dtype)


def guided_blocks(
    blocks: Blocks,
    format: Fp4Format,
    row_axes: tuple[int, ...],
    *,
    usable: Bool[Array, "..."],
    row_exponent: Int32[Array, "..."],
    scales: Int32[Array, "..."],
    record: Int32[Array, "..."] | None,
    mode: str,
    compact: bool,
) -> BlockCodes:
    """The rule of `api.guided_round`, in arithmetic that Pallas kernels share.

    Args:
      blocks: the trainer's values.
      usable, row_exponent: per row, of the record.
      scales: per block, its bytes, or their two low bits when `compact`.
      record: per value, low bit ("mantissa") or signed code ("full"); None in mode "scale".
    """
    row_exponent = jnp.where(usable, row_exponent, own_row_exponent(blocks, format, row_axes))
    # One set of scales serves both kinds of row. For a guided row `own` is under the rollout's row scale,
    # which is what compact scales are relative to; for the others it is the row's own quantization.
    own = own_scales(blocks, row_exponent, format)
    recorded = rebuilt_scales(scales, own, format) if compact else scales
    scales = jnp.where(blocks.expand_rows(usable) & ~blocks.non_finite, recorded, own)

    threshold = blocks.expand(threshold_scales(scales, format))
    y = scaled(blocks.magnitude, blocks.expand(blocks.expand_rows(row_exponent)), format)
    code = formats.nearest_magnitude(y, threshold)
    if mode != "scale":
        value = formats.magnitude_value(code) * threshold
        off_zero = blocks.magnitude >= blocks.expand(_smallest_off_zero(scales, row_exponent, blocks, format))
        # The nearest code is one of the two neighbours; which one, and so the other, follows from one
        # comparison.
        low = code - (y < value).astype(jnp.int32)
        beyond = jnp.where(code == 0, off_zero.astype(jnp.int32), (y > value).astype(jnp.int32))
        high = jnp.minimum(code + beyond, 7)
        if mode == "mantissa":
            take_high = (low ^ record) & 1 == 1
        else:
            # E2M1 magnitudes are ordered like their codes: `high` is nearer only to a value at or beyond it,
            # same sign.
            take_high = ((record >= 8) == blocks.negative) & (record & 7 >= high)
        guided = jnp.where(take_high, high, low)
        code = jnp.where(blocks.expand(blocks.expand_rows(usable)), guided, code)
    return BlockCodes(blocks.signed(code), scales, row_exponent)


def _smallest_off_zero(
    scales: Int32[Array, "..."], row_exponent: Int32[Array, "..."], blocks: Blocks, format: Fp4Format
) -> Int32[Array, "..."]:
    """Per block, bits of the smallest |x| that does not count as 0: 2^(e - 126); none under scale 0 or NaN.

    An integer comparison, since |x| or |x| / 2^e may be a subnormal that the backend flushes.
    """
    e = row_exponent - formats.ROW_EXPONENT_BIAS
    subnormal = jnp.int32(1) << jnp.clip(
        e + 23, 16, 22
    )  # 2^(e - 126) in steps of 2^-149, from BF16's least up
    smallest = blocks.expand_rows(jnp.where(e >= 0, (e + 1) << 23, subnormal))
    usable = ~formats.poisoned(scales, format)
    if format.scale_dtype == "e4m3":
        usable &= scales > 0
    return jnp.where(usable, smallest, jnp.iinfo(jnp.int32).max)


def usable_rows(guide: Guide, format: Fp4Format, row_axes: tuple[int, ...] = (-1,)) -> Bool[Array, "..."]:
    """See `api.usable_rows`."""
    if guide.compact:
        return guide.valid  # poisoned rows are not encoded in compact scales
    return guide.valid & ~jnp.any(formats.poisoned(guide.scales, format), axis=row_axes)


def own_scale_bytes(
    x: Shaped[Array, "..."], format: Fp4Format, row_exponent: UInt8[Array, "..."], *, axis: int = -1
) -> UInt8[Array, "..."]:
    """See `api.own_scale_bytes`."""
    return own_scales(split_blocks(x, format, axis), row_exponent, format).astype(jnp.uint8)


def expand_compact_scales(
    packed: UInt8[Array, "..."], own: UInt8[Array, "..."], format: Fp4Format, axis: int = -1
) -> UInt8[Array, "..."]:
    """See `api.expand_compact_scales`."""
    low_bits = _low_bits(packed, own.shape[axis], axis)
    return rebuilt_scales(low_bits, own.astype(jnp.int32), format).astype(jnp.uint8)


def _low_bits(packed: UInt8[Array, "..."], count: int, axis: int) -> Int32[Array, "..."]:
    """The first `count` two-bit values along `axis`."""
    low_bits = formats.unpack_two_bits(packed, axis).astype(jnp.int32)
    return low_bits[..., :count] if axis == -1 else low_bits[..., :count, :]


def rebuilt_scales(
    low_bits: Int32[Array, "..."], own: Int32[Array, "..."], format: Fp4Format
) -> Int32[Array, "..."]:
    """Scale bytes from their two low bits and the trainer's own bytes."""
    return jnp.clip(own + ((low_bits - own + 1) & 3) - 1, *format.scale_range)
