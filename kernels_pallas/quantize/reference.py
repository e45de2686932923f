"""Quantize and dequantize in plain JAX: the definition that every other implementation is compared with."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float32, Int32, Shaped, UInt8

from kernels_pallas import formats, norms
from kernels_pallas.arrays import Fp4Array, Fp4Codes, expand_rows
from kernels_pallas.blocks import BlockCodes, Blocks, own_scales, scaled, split_blocks, threshold_scales
from kernels_pallas.formats import Fp4Format

FOUR_OVER_SIX_DIVISOR = 6.0 * 256.0  # scales up to 256, so that the map-to-4 scale (x 1.5) stays below 448


def quantize(
    x: Shaped[Array, "..."],
    format: Fp4Format,
    *,
    axis: int = -1,
    row_axes: tuple[int, ...] = (-1,),
    scale_rule: str = "amax",
) -> Fp4Array:
    """See `api.quantize`."""
    codes = quantize_codes(x, format, axis=axis, row_axes=row_axes, scale_rule=scale_rule)
    return Fp4Array.from_codes(codes, axis)


def quantize_recorded(x: Shaped[Array, "..."], format: Fp4Format) -> tuple[Fp4Array, UInt8[Array, "..."]]:
    """See `api.quantize_recorded`."""
    codes = quantize_codes(x, format)
    return Fp4Array.from_codes(codes), formats.pack_bits(codes.codes & 1)


def rms_norm_quantize(
    x: Float[Array, "*rows k"], gain: Float[Array, " k"], eps: float, format: Fp4Format
) -> tuple[BFloat16[Array, "*rows k"], Fp4Array, UInt8[Array, "..."]]:
    """See `api.rms_norm_quantize`."""
    h = norms.rms_norm(x, gain, eps).astype(jnp.bfloat16)
    return h, *quantize_recorded(h, format)


def quantize_codes(
    x: Shaped[Array, "..."],
    format: Fp4Format,
    *,
    axis: int = -1,
    row_axes: tuple[int, ...] = (-1,),
    scale_rule: str = "amax",
) -> Fp4Codes:
    """Nearest-even codes, scales and row exponents of `x` (rules 1 to 4), one byte per code, `axis` in
    place.
    """
    blocks = split_blocks(x, format, axis)
    rule = _four_over_six if scale_rule == "4over6" else quantize_blocks
    return rule(blocks, format, row_axes).stored(blocks, format)


def quantize_blocks(blocks: Blocks, format: Fp4Format, row_axes: tuple[int, ...]) -> BlockCodes:
    """Rules 1 to 4, in arithmetic that Pallas kernels share."""
    row_exponent = own_row_exponent(blocks, format, row_axes)
    scales = own_scales(blocks, row_exponent, format)
    magnitude = nearest(blocks, row_exponent, scales, format)
    return BlockCodes(blocks.signed(magnitude), scales, row_exponent)


def own_row_exponent(
    blocks: Blocks, format: Fp4Format, row_axes: tuple[int, ...], divisor: float = 2688.0
) -> Int32[Array, "..."]:
    """Exponent byte of each row (rule 1); 127 for a format without row scales."""
    amax = blocks.row_amax(row_axes)
    if not format.has_row_scale:
        return jnp.full(amax.shape, formats.ROW_EXPONENT_BIAS, jnp.int32)
    return formats.row_exponent_from_amax(amax, divisor)


def nearest(
    blocks: Blocks, row_exponent: Int32[Array, "..."], scales: Int32[Array, "..."], format: Fp4Format
) -> Array:
    """3-bit codes (int32, blocked shape) of the nearest E2M1 values under the given scales (rule 3)."""
    y = scaled(blocks.magnitude, blocks.expand(blocks.expand_rows(row_exponent)), format)
    return formats.nearest_magnitude(y, blocks.expand(threshold_scales(scales, format)))


def _four_over_six(blocks: Blocks, format: Fp4Format, row_axes: tuple[int, ...]) -> BlockCodes:
    """Per block, the map of its maximum to 6 or to 4 with the lower squared error; a tie keeps 6."""
    row_exponent = own_row_exponent(blocks, format, row_axes, FOUR_OVER_SIX_DIVISOR)
    y = scaled(blocks.magnitude, blocks.expand(blocks.expand_rows(row_exponent)), format)

    def candidate(multiplier):
        scales = own_scales(blocks, row_exponent, format, multiplier)
        magnitude = formats.nearest_magnitude(y, blocks.expand(threshold_scales(scales, format)))
        value = formats.magnitude_value(magnitude) * blocks.expand(formats.decode_scales(scales, format))
        return scales, magnitude, jnp.sum(jnp.square(y - value), axis=blocks.axis)

    six_scales, six, six_error = candidate(1 / 6)
    four_scales, four, four_error = candidate(1 / 4)
    use_four = four_error < six_error  # false for NaN: a poisoned block is the same either way
    return BlockCodes(
        blocks.signed(jnp.where(blocks.expand(use_four), four, six)),
        jnp.where(use_four, four_scales, six_scales),
        row_exponent,
    )


def _scaled_codes(a: Fp4Codes) -> Float32[Array, "..."]:
    """code x block scale in float32, in the tensor's own shape."""
    split = (*a.shape[: a.axis], a.scales.shape[a.axis], a.format.block, *a.shape[a.ndim + a.axis + 1 :])
    scale = jnp.expand_dims(formats.decode_scales(a.scales, a.format), a.axis)
    return (formats.decode_codes(a.codes).reshape(split) * scale).reshape(a.shape)


def _codes_in_place(a: Fp4Array | Fp4Codes) -> Fp4Codes:
    if isinstance(a, Fp4Codes):
        return a
    return Fp4Codes(
        codes=formats.unpack_codes(a.words, a.axis),
        scales=a.scales,
        row_exponent=a.row_exponent,
        format=a.format,
        axis=a.axis,
    )


def operand(a: Fp4Array | Fp4Codes) -> Float[Array, "..."]:
    """See `api.operand`."""
    return _scaled_codes(_codes_in_place(a)).astype(jnp.bfloat16)


def dequantize(a: Fp4Array | Fp4Codes, dtype: DTypeLike = jnp.bfloat16) -> Float[Array, "..."]:
    """See `api.dequantize`."""
    value = _scaled_codes(_codes_in_place(a))
    if a.format.has_row_scale:
        value = value * formats.row_scale(expand_rows(a.row_exponent, a.ndim, a.axis))
    return value.astype(dtype)
