"""Tiles of rows in Triton kernels: where a program's rows lie and how their FP4 parts are written."""

import triton.language as tl

from kernels_pallas.triton_fp4 import (
    block_amax,
    load_block,
    packed_low_bits,
    quantize_block,
    row_amax,
    row_exponent_of,
    store_words,
)
from kernels_pallas.triton_jit import jit


@jit
def tile_rows(rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """This program's first row, its rows counted from there, its blocks, and which rows and blocks exist."""
    start = tl.program_id(0).to(tl.int64) * ROWS
    row, block = tl.arange(0, ROWS), tl.arange(0, BLOCKS)
    inside = start + row < rows
    return start, row, block, inside, inside[:, None] & (block < SIZE // BLOCK)[None, :]


@jit
def own_row_exponent(words, amax, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Exponent bytes of rows (rule 1); 127 for MXFP4."""
    if BLOCK == 32:
        exponent = tl.full([ROWS], 127, tl.int32)
    else:
        exponent = row_exponent_of(row_amax(words, amax))
    return exponent


@jit
def load_rows(x_ptr, start, row, block, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The tile's blocks of BF16 rows, two values to a word."""
    x_ptr = x_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + start * (SIZE // 2)
    return load_block(
        x_ptr, row[:, None] * (SIZE // 2) + block[None, :] * (BLOCK // 2), mask, MASKED, BLOCK // 8
    )


@jit
def quantized_rows(words, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Code words, scale bytes and row exponents of a tile."""
    amax = block_amax(words)
    row_exponent = own_row_exponent(words, amax, ROWS, BLOCK)
    codes, byte = quantize_block(words, amax, row_exponent[:, None], BLOCK)
    return codes, byte, row_exponent


@jit
def store_fp4(
    words_ptr, scales_ptr, row_exponent_ptr, codes, byte, row_exponent, row, block, inside, mask,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write code words, scale bytes and row exponents of rows `row`, counted from the pointers."""
    offsets = row[:, None] * (SIZE // 8) + block[None, :] * (BLOCK // 8)
    store_words(words_ptr, offsets, mask, MASKED, codes)
    tl.store(scales_ptr + row[:, None] * (SIZE // BLOCK) + block[None, :], byte.to(tl.uint8), mask=mask)
    tl.store(row_exponent_ptr + row, row_exponent.to(tl.uint8), mask=inside)


@jit
def block_bits(pointer, start, row, block, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the bits, one a value, of each block: 16 or 32 bits of a uint8 array `[rows, SIZE / 8]`."""
    width: tl.constexpr = tl.uint32 if BLOCK == 32 else tl.uint16
    pointer = pointer.to(tl.pointer_type(width), bitcast=True) + start * (SIZE // BLOCK)
    return pointer + row[:, None] * (SIZE // BLOCK) + block[None, :]


@jit
def store_low_bits(
    pointer, codes, start, row, block, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the low bits of codes, what a record keeps of them."""
    pointers = block_bits(pointer, start, row, block, SIZE, BLOCK)
    tl.store(pointers, packed_low_bits(codes).to(pointers.dtype.element_ty), mask=mask)
