"""A tensor's magnitudes in blocks, and the maxima that scales are made of. Shared by the quantizing ops."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Integer, Shaped

from kernels_pallas import formats
from kernels_pallas.arrays import Fp4Codes, check_axis, check_block, expand_rows
from kernels_pallas.formats import Fp4Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """BF16-rounded input in blocks along `axis`, which keeps its place: axis K becomes (K / block, block).

    Attributes:
      magnitude: int32 float32-bits of |x|, [..., K / block, block] (axis -1) or [..., K / block, block, N]
        (axis -2).
      negative: sign bits, same shape.
      amax: int32 bits of each block's largest finite magnitude; the axis `block` gone.
      non_finite: bool per block, whether it holds NaN or Inf.
    """

    magnitude: Int32[Array, "..."]
    negative: Bool[Array, "..."]
    amax: Int32[Array, "..."]
    non_finite: Bool[Array, "..."]
    axis: int
    shape: tuple[int, ...]

    def row_amax(self, row_axes: tuple[int, ...]) -> Int32[Array, "..."]:
        """Bits of each row's largest finite magnitude, those in non-finite blocks included; row axes gone."""
        return jnp.max(self.amax, axis=row_axes)

    def expand(self, blocks: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """A per-block array, so that it broadcasts against `magnitude`."""
        return jnp.expand_dims(blocks, self.axis)

    def expand_rows(self, rows: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """A per-row array, so that it broadcasts against `amax`."""
        return expand_rows(rows, len(self.shape), self.axis)

    def signed(self, magnitude_codes: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """4-bit codes: the sign added, except to code 0."""
        return magnitude_codes + jnp.where(self.negative & (magnitude_codes > 0), 8, 0)


class BlockCodes(NamedTuple):
    """A quantized tensor while it is computed: all int32.

    `codes` are signed, in the shape of `Blocks.magnitude`; `scales` one byte per block; `row_exponent` one per row.
    """

    codes: Int32[Array, "..."]
    scales: Int32[Array, "..."]
    row_exponent: Int32[Array, "..."]

    def stored(self, blocks: Blocks, format: Fp4Format) -> Fp4Codes:
        """The same in one byte per code, in the input's shape."""
        return Fp4Codes(
            codes=self.codes.astype(jnp.uint8).reshape(blocks.shape),
            scales=self.scales.astype(jnp.uint8),
            row_exponent=self.row_exponent.astype(jnp.uint8),
            format=format,
            axis=blocks.axis,
        )


def split_blocks(x: Shaped[Array, "..."], format: Fp4Format, axis: int) -> Blocks:
    """Round `x` to BF16 and arrange it in blocks along `axis`.

    Raises TypeError for a dtype that is not bfloat16 or float32, ValueError for an axis that is no whole
    number of blocks.
    """
    check_axis(axis)
    check_block(x.shape[axis], axis, format)
    return split_bits(formats.signed_bits(x), format, axis)


def split_bits(bits: Int32[Array, "..."], format: Fp4Format, axis: int) -> Blocks:
    """The blocks of a tensor given by the float32 bits of its BF16 values."""
    shape = bits.shape
    bits = bits.reshape(
        (*shape[:axis], shape[axis] // format.block, format.block, *shape[len(shape) + axis + 1 :])
    )
    magnitude = bits & 0x7FFFFFFF
    # Magnitudes compare like their bits, so maxima are integer maxima: exact, subnormals and NaN included.
    finite = jnp.where(magnitude < formats.INFINITY_BITS, magnitude, 0)
    return Blocks(
        magnitude=magnitude,
        negative=bits < 0,
        amax=jnp.max(finite, axis=axis),
        non_finite=jnp.max(magnitude, axis=axis) >= formats.INFINITY_BITS,
        axis=axis,
        shape=shape,
    )


def own_scales(
    blocks: Blocks, row_exponent: Integer[Array, "..."], format: Fp4Format, multiplier: float = 1 / 6
) -> Int32[Array, "..."]:
    """Scale bytes under the given row exponents (rule 2), poisoned where a block is not finite (rule 4)."""
    amax = scaled(blocks.amax, blocks.expand_rows(row_exponent), format)
    return jnp.where(blocks.non_finite, format.poison, formats.encode_scales(amax, format, multiplier))


def scaled(
    magnitude: Int32[Array, "..."], row_exponent: Integer[Array, "..."], format: Fp4Format
) -> Float32[Array, "..."]:
    """|x| / 2^e from the bits of |x|: exact, or below 2^-126, where every use of it counts it as 0."""
    value = formats.from_bits(magnitude)
    if not format.has_row_scale:
        return value
    return value * formats.power_of_two(formats.ROW_EXPONENT_BIAS - row_exponent.astype(jnp.int32))


def threshold_scales(scales: Integer[Array, "..."], format: Fp4Format) -> Float32[Array, "..."]:
    """Scales for `formats.nearest_magnitude`: Inf in place of 0, so that scale 0 gives code 0 (rule 3)."""
    value = formats.decode_scales(scales, format)
    return jnp.where(value == 0, jnp.inf, value) if format.scale_dtype == "e4m3" else value
