"""Quantize on TPUs: one pass over rows, the arithmetic of the reference on a transposed tile.

Rows are tokens, values along a row lie on lanes. Reducing a block of 16 or 32 neighbours along sublanes costs
additions, along lanes shuffles: so a tile is transposed once, quantized with its blocks along sublanes, packed there
(8 sublanes a word), and the small results are transposed back.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Shaped, UInt8

from kernels_pallas import formats, norms
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.blocks import Blocks, split_bits
from kernels_pallas.formats import Fp4Format
from kernels_pallas.implementations import empty_refusal
from kernels_pallas.quantize.reference import quantize_blocks
from kernels_pallas.quantize.rows import options_refusal
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
    return options_refusal(axis=axis, row_axes=row_axes, scale_rule=scale_rule) or row_refusal(x)


def row_refusal(x: jax.Array | jax.ShapeDtypeStruct, *args: Any) -> str | None:
    """Why the kernels of rows along the last axis do not serve `x`, None if they do."""
    if x.shape[-1] > MAX_ROW:
        return f"a row of {x.shape[-1]} values exceeds its {MAX_ROW}"
    return empty_refusal(x)


def quantize(
    x: Shaped[Array, "..."], format: Fp4Format, *, axis: int, row_axes: tuple[int, ...], scale_rule: str
) -> Fp4Array:
    """See `api.quantize`."""
    del axis, row_axes, scale_rule  # `refusal` admits one value of each
    return _quantize_rows(x, format, recorded=False)[0]


def quantize_recorded(x: Shaped[Array, "..."], format: Fp4Format) -> tuple[Fp4Array, UInt8[Array, "..."]]:
    """See `api.quantize_recorded`."""
    return _quantize_rows(x, format, recorded=True)


def rms_norm_quantize(
    x: Float[Array, "*rows k"], gain: Float[Array, " k"], eps: float, format: Fp4Format
) -> tuple[BFloat16[Array, "*rows k"], Fp4Array, UInt8[Array, "..."]]:
    """See `api.rms_norm_quantize`."""
    packed, bits, h = _quantize_rows(x, format, recorded=True, gain=gain, eps=eps)
    return h, packed, bits


def _quantize_rows(x, format, *, recorded, gain=None, eps=None):
    """The packed rows; with `recorded` their low bits; with a `gain` the rows, normed by it, that were quantized."""
    lead, size = x.shape[:-1], x.shape[-1]
    inputs = [rounded_rows(x)] if gain is None else [x.reshape(-1, size), gain[None]]
    rows = inputs[0].shape[0]
    outputs = [(size // 8, jnp.int32), (size // format.block, jnp.int32), (1, jnp.int32)]
    outputs += [(size // 8, jnp.int32)] if recorded else []
    outputs += [(size, jnp.bfloat16)] if gain is not None else []
    words, scales, row_exponent, *rest = pl.pallas_call(
        functools.partial(_kernel, format=format, recorded=recorded, eps=eps),
        grid=(pl.cdiv(rows, ROWS),),
        in_specs=[
            pl.BlockSpec((ROWS, size), lambda i: (i, 0)),
            *(pl.BlockSpec((1, size), lambda i: (0, 0)) for _ in inputs[1:]),
        ],
        out_specs=[pl.BlockSpec((ROWS, width), lambda i: (i, 0)) for width, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct((rows, width), dtype) for width, dtype in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpreted(),
        name=f"{'' if gain is None else 'rms_norm_'}quantize_{'recorded_' if recorded else ''}{format.name}",
    )(*inputs)
    packed_rows = Fp4Array(
        words=lax.bitcast_convert_type(words, jnp.uint32).reshape(*lead, size // 8),
        scales=scales.astype(jnp.uint8).reshape(*lead, size // format.block),
        row_exponent=row_exponent.astype(jnp.uint8).reshape(lead),
        format=format,
    )
    bits = [rest[0].astype(jnp.uint8).reshape(*lead, size // 8)] if recorded else []
    return packed_rows, *bits, *(h.reshape(x.shape) for h in rest[1:])


def _kernel(x_ref, *refs, format: Fp4Format, recorded: bool, eps: float | None):
    x = x_ref[...]
    if eps is not None:
        gain_ref, *refs = refs
        x = norms.rms_norm(x, gain_ref[0], eps)
        # Interpreted, XLA would drop the cast to BF16 from the pair that it makes with the one back.
        x = (formats.round_to_bf16(x) if interpreted() else x).astype(jnp.bfloat16)
        *refs, h_ref = refs
        h_ref[...] = x
    words_ref, scales_ref, row_exponent_ref, *bits_ref = refs
    codes = quantize_blocks(transposed_blocks(x, format), format, (-2,))
    words_ref[...] = packed(codes.codes).T
    scales_ref[...] = codes.scales.T
    row_exponent_ref[...] = codes.row_exponent[None].T
    if recorded:
        bits_ref[0][...] = packed(codes.codes & 1, bits=1).T


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


def packed(codes: jax.Array, bits: int = 4) -> jax.Array:
    """8 values of `bits` bits along sublanes in one int32, `[K / 8, rows]`: as `formats.pack_codes` and `pack_bits`."""
    by_word = codes.reshape(-1, 8, codes.shape[-1])
    shifts = lax.broadcasted_iota(jnp.int32, by_word.shape, 1) * bits
    return jnp.sum(by_word << shifts, axis=1)
