"""Guided rounding in plain JAX: the definition that every other implementation is compared with."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped, UInt8

from kernels_pallas import formats
from kernels_pallas.arrays import Fp4Codes
from kernels_pallas.blocks import Blocks, own_scales, scaled, split_blocks, threshold_scales
from kernels_pallas.formats import Fp4Format
from kernels_pallas.guided_round.guide import Guide
from kernels_pallas.quantize.reference import own_row_exponent


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
    usable = usable_rows(guide, format, row_axes)
    row_exponent = jnp.where(usable, guide.row_exponent, own_row_exponent(blocks, format, row_axes))
    # One set of scales serves both kinds of row. For a guided row `own` is under the rollout's row scale,
    # which is what compact scales are relative to; for the others it is the row's own quantization.
    own = own_scales(blocks, row_exponent, format)
    recorded = expand_compact_scales(guide.scales, own, format, axis) if guide.compact else guide.scales
    scales = jnp.where(blocks.expand_rows(usable) & ~blocks.non_finite, recorded, own)

    threshold = blocks.expand(threshold_scales(scales, format))
    y = scaled(blocks.magnitude, blocks.expand(blocks.expand_rows(row_exponent)), format)
    code = formats.nearest_magnitude(y, threshold)
    if guide.mode != "scale":
        value = formats.magnitude_value(code) * threshold
        off_zero = blocks.magnitude >= blocks.expand(_smallest_off_zero(scales, row_exponent, blocks, format))
        # The nearest code is one of the two neighbours; which one, and so the other, follows from one
        # comparison.
        low = code - (y < value)
        high = jnp.minimum(code + jnp.where(code == 0, off_zero, y > value), 7)
        guided = jnp.where(_take_high(guide, low, high, blocks, axis), high, low)
        code = jnp.where(blocks.expand(blocks.expand_rows(usable)), guided, code)
    return Fp4Codes(
        codes=blocks.codes(code), scales=scales, row_exponent=row_exponent, format=format, axis=axis
    )


def _take_high(
    guide: Guide, low: Int32[Array, "..."], high: Int32[Array, "..."], blocks: Blocks, axis: int
) -> Bool[Array, "..."]:
    if guide.mode == "mantissa":
        bit = formats.unpack_bits(guide.mantissa, axis).reshape(low.shape).astype(jnp.int32)
        return (low ^ bit) & 1 == 1
    record = formats.unpack_codes(guide.words, axis).reshape(low.shape).astype(jnp.int32)
    # E2M1 magnitudes are ordered like their codes: `high` is nearer only to a value at or beyond it, same
    # sign.
    return ((record >= 8) == blocks.negative) & (record & 7 >= high)


def _smallest_off_zero(
    scales: UInt8[Array, "..."], row_exponent: UInt8[Array, "..."], blocks: Blocks, format: Fp4Format
) -> Int32[Array, "..."]:
    """Per block, bits of the smallest |x| that does not count as 0: 2^(e - 126); none under scale 0 or NaN.

    An integer comparison, since |x| or |x| / 2^e may be a subnormal that the backend flushes.
    """
    e = row_exponent.astype(jnp.int32) - formats.ROW_EXPONENT_BIAS
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
    return own_scales(split_blocks(x, format, axis), row_exponent, format)


def expand_compact_scales(
    packed: UInt8[Array, "..."], own: UInt8[Array, "..."], format: Fp4Format, axis: int = -1
) -> UInt8[Array, "..."]:
    """See `api.expand_compact_scales`."""
    low_bits = formats.unpack_two_bits(packed, axis)
    count = own.shape[axis]
    low_bits = low_bits[..., :count] if axis == -1 else low_bits[..., :count, :]
    t = own.astype(jnp.int32)
    rebuilt = t + ((low_bits.astype(jnp.int32) - t + 1) & 3) - 1
    return jnp.clip(rebuilt, *format.scale_range).astype(jnp.uint8)
