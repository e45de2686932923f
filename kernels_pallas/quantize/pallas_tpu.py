"""Quantize on TPUs: one pass over rows, the arithmetic of the reference on a transposed tile.

Rows are tokens, values along a row lie on lanes. Reducing a block of 16 or 32 neighbours along sublanes costs
additions, along lanes shuffles: so a tile is transposed once, quantized with its blocks along sublanes, packed there
(8 sublanes a word), and the small results are transposed back.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from kernels_pallas import formats
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.blocks import BlockCodes, Blocks, split_bits
from kernels_pallas.formats import Fp4Format
from kernels_pallas.quantize.reference import quantize_blocks
from kernels_pallas.target import interpreted

ROWS = 128  # of a tile: after the transposition they fill the lanes
MAX_ROW = 4096  # values; a tile of 8192 and its temporaries overflow the VMEM of v5e and v6e


def refusal(
    x: jax.Array | jax.ShapeDtypeStruct,
    format: Fp4Format,
    *,
    axis: int,
    row_axes: tuple[int, ...],
    scale_rule: str,
) -> str | None:
    """Why this kernel does not serve these arguments, None if it does."""
    if axis != -1 or row_axes != (-1,):
        return f"it quantizes rows along the last axis, not axis {axis} with row axes {row_axes}"
    if scale_rule != "amax":
        return f"it has no scale rule {scale_rule!r}"
    if x.shape[-1] > MAX_ROW:
        return f"a row of {x.shape[-1]} values exceeds its {MAX_ROW}"
    return None


def quantize(
    x: Shaped[Array, "..."], format: Fp4Format, *, axis: int, row_axes: tuple[int, ...], scale_rule: str
) -> Fp4Array:
    """See `api.quantize`."""
    del axis, row_axes, scale_rule  # `refusal` admits one value of each
    lead, size = x.shape[:-1], x.shape[-1]
    words, scales, row_exponent = _quantize_rows(rounded_rows(x), format)
    return Fp4Array(
        words=words.reshape(*lead, size // 8),
        scales=scales.reshape(*lead, size // format.block),
        row_exponent=row_exponent.reshape(lead),
        format=format,
    )


def _quantize_rows(x: jax.Array, format: Fp4Format) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, size = x.shape
    widths = (size // 8, size // format.block, 1)
    words, scales, row_exponent = pl.pallas_call(
        functools.partial(_kernel, format=format),
        grid=(pl.cdiv(rows, ROWS),),
        in_specs=[pl.BlockSpec((ROWS, size), lambda i: (i, 0))],
        out_specs=[pl.BlockSpec((ROWS, width), lambda i: (i, 0)) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((rows, width), jnp.int32) for width in widths],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpreted(),
        name=f"quantize_{format.name}",
    )(x)
    return (
        lax.bitcast_convert_type(words, jnp.uint32),
        scales.astype(jnp.uint8),
        row_exponent.astype(jnp.uint8),
    )


def _kernel(x_ref, words_ref, scales_ref, row_exponent_ref, *, format: Fp4Format):
    blocks = transposed_blocks(x_ref[...], format)
    codes = quantize_blocks(blocks, format, (-2,))
    words_ref[...] = packed(codes).T
    scales_ref[...] = codes.scales.T
    row_exponent_ref[...] = codes.row_exponent[None].T


def rounded_rows(x: Shaped[Array, "..."]) -> Array:
    """`x` in BF16 as rows `[rows, K]`, rounded so that XLA cannot drop it.

    BFloat16 values reach a kernel on a TPU as they are. Interpreted, it is part of the program around it, where the
    cast that made them may be the first half of a pair that XLA removes.
    """
    if x.dtype != jnp.bfloat16 or interpreted():
        x = formats.round_to_bf16(x).astype(jnp.bfloat16)
    return x.reshape(-1, x.shape[-1])


def transposed_blocks(x: jax.Array, format: Fp4Format) -> Blocks:
    """Blocks along sublanes of a BF16 tile `[rows, K]`."""
    return split_bits(lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32).T, format, -2)


def packed(codes: BlockCodes) -> jax.Array:
    """8 codes along sublanes in one int32, `[K / 8, rows]`: `formats.pack_codes` in the types that Mosaic has."""
    by_word = codes.codes.reshape(-1, 8, codes.codes.shape[-1])
    shifts = lax.broadcasted_iota(jnp.int32, by_word.shape, 1) * 4
    return jnp.sum(by_word << shifts, axis=1)
