"""Guided rounding on TPUs: one pass over rows, the arithmetic of the reference on a transposed tile."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from kernels_pallas import formats
from kernels_pallas.arrays import Fp4Codes
from kernels_pallas.blocks import BlockCodes
from kernels_pallas.formats import Fp4Format
from kernels_pallas.guided_round.guide import Guide
from kernels_pallas.guided_round.reference import guided_blocks, usable_rows
from kernels_pallas.quantize.pallas_tpu import ROWS, packed, rounded_rows, row_refusal, transposed_blocks
from kernels_pallas.quantize.reference import quantize_blocks
from kernels_pallas.quantize.rows import options_refusal
from kernels_pallas.target import interpreted


def refusal(
    x: jax.Array | jax.ShapeDtypeStruct,
    guide: Guide,
    format: Fp4Format,
    *,
    axis: int,
    row_axes: tuple[int, ...],
) -> str | None:
    """Why this kernel does not serve these arguments, None if it does."""
    return options_refusal(axis=axis, row_axes=row_axes) or row_refusal(x)


def guided_round(
    x: Shaped[Array, "..."], guide: Guide, format: Fp4Format, *, axis: int, row_axes: tuple[int, ...]
) -> Fp4Codes:
    """See `api.guided_round`."""
    del axis, row_axes  # `refusal` admits one value of each
    lead, size = x.shape[:-1], x.shape[-1]
    widths = (size // 8, size // format.block, 1)
    words, scales, row_exponent = _call(_codes_kernel, "round", x, guide, format, widths, jnp.int32)
    return Fp4Codes(
        codes=formats.unpack_codes(lax.bitcast_convert_type(words, jnp.uint32)).reshape(*lead, size),
        scales=scales.astype(jnp.uint8).reshape(*lead, widths[1]),
        row_exponent=row_exponent.astype(jnp.uint8).reshape(lead),
        format=format,
    )


def guided_values(x: Shaped[Array, "..."], guide: Guide | None, format: Fp4Format) -> Shaped[Array, "..."]:
    """See `api.guided_values`."""
    (values,) = _call(_values_kernel, "values", x, guide, format, x.shape[-1:], x.dtype)
    return values.reshape(x.shape)


def _call(kernel, name, x, guide, format, widths, dtype):
    """Outputs [rows, width] of a kernel over rows of `x` and of the record."""
    x = rounded_rows(x)
    rows, inputs, mode, compact = x.shape[0], [], "none", False
    if guide is not None:
        mode, compact = guide.mode, guide.compact
        record = {"mantissa": guide.mantissa, "full": guide.words, "scale": None}[mode]
        usable = usable_rows(guide, format)
        inputs = [guide.scales, guide.row_exponent, usable.astype(jnp.uint8)]
        inputs += [] if record is None else [record]
    inputs = [x, *(leaf.reshape(rows, -1) for leaf in inputs)]
    return pl.pallas_call(
        functools.partial(kernel, inputs=len(inputs), format=format, mode=mode, compact=compact),
        grid=(pl.cdiv(rows, ROWS),),
        in_specs=[pl.BlockSpec((ROWS, leaf.shape[1]), lambda i: (i, 0)) for leaf in inputs],
        out_specs=[pl.BlockSpec((ROWS, width), lambda i: (i, 0)) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((rows, width), dtype) for width in widths],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpreted(),
        name=f"guided_{name}_{format.name}_{mode}",
    )(*inputs)


def _codes_kernel(*refs, inputs: int, format: Fp4Format, mode: str, compact: bool):
    words_ref, scales_ref, row_exponent_ref = refs[inputs:]
    codes = _block_codes(refs[:inputs], format, mode, compact)
    words_ref[...] = packed(codes.codes).T
    scales_ref[...] = codes.scales.T
    row_exponent_ref[...] = codes.row_exponent[None].T


def _values_kernel(*refs, inputs: int, format: Fp4Format, mode: str, compact: bool):
    (values_ref,) = refs[inputs:]
    codes = _block_codes(refs[:inputs], format, mode, compact)
    value = formats.decode_codes(codes.codes) * formats.decode_scales(codes.scales, format)[:, None]
    if format.has_row_scale:
        value = value * formats.row_scale(codes.row_exponent)[None, None]
    values_ref[...] = value.reshape(-1, value.shape[-1]).T.astype(values_ref.dtype)


def _block_codes(refs, format: Fp4Format, mode: str, compact: bool) -> BlockCodes:
    """Codes of a tile of rows under the record of its other refs, if it has any."""
    x_ref, *record_refs = refs
    blocks = transposed_blocks(x_ref[...], format)
    if not record_refs:
        return quantize_blocks(blocks, format, (-2,))
    scales_ref, row_exponent_ref, usable_ref, *record_refs = record_refs
    scales = _transposed(scales_ref)
    if compact:
        scales = _spread(scales, 2)[: blocks.amax.shape[0]]
    record = None
    if record_refs:
        record = _spread(_transposed(record_refs[0]), 1 if mode == "mantissa" else 4)
        record = record.reshape(blocks.magnitude.shape)
    return guided_blocks(
        blocks,
        format,
        (-2,),
        usable=_transposed(usable_ref)[0] != 0,
        row_exponent=_transposed(row_exponent_ref)[0],
        scales=scales,
        record=record,
        mode=mode,
        compact=compact,
    )


def _transposed(ref) -> jax.Array:
    """A byte or word per lane `[rows, n]` as int32 `[n, rows]`."""
    value = ref[...]
    if value.dtype == jnp.uint32:
        return lax.bitcast_convert_type(value, jnp.int32).T
    return value.astype(jnp.int32).T


def _spread(words: jax.Array, bits: int) -> jax.Array:
    """Fields of `bits` bits of each word along sublanes, 8 a word (4 a byte for 2 bits), as `formats.unpack_*`."""
    count = 4 if bits == 2 else 8
    shape = (words.shape[0], count, words.shape[1])
    shifts = lax.broadcasted_iota(jnp.int32, shape, 1) * bits
    fields = lax.shift_right_logical(jnp.broadcast_to(words[:, None], shape), shifts) & (2**bits - 1)
    return fields.reshape(-1, words.shape[1])
