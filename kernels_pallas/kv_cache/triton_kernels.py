"""Triton kernels that write keys and values into the cache. Imports triton: loaded only where a kernel is called."""

import triton.language as tl

from kernels_pallas.triton_fp4 import load_block, store_words
from kernels_pallas.triton_jit import jit
from kernels_pallas.triton_rows import load_rows, quantized_rows, store_fp4, store_low_bits, tile_rows


@jit
def append_fp4_kernel(
    k_ptr, v_ptr, positions_ptr, valid_ptr, page_table_ptr, layer_ptr,
    k_words_in, k_scales_in, k_exponent_in, v_words_in, v_scales_in, v_exponent_in, rows,
    k_words_ptr, k_scales_ptr, k_exponent_ptr, v_words_ptr, v_scales_ptr, v_exponent_ptr,
    k_row_words_ptr, k_row_scales_ptr, k_row_exponent_ptr, k_low_bits_ptr,
    v_row_words_ptr, v_row_scales_ptr, v_row_exponent_ptr, v_low_bits_ptr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, LENGTH: tl.constexpr, SEQUENCES: tl.constexpr,
    PAGES: tl.constexpr, LAYERS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Quantize rows [token, head] of k and v (grid axis 1), write them to the cache in place, with low bits to
    arrays of rows.

    The `_in` pointers are those of the cache before it is written: the same buffers.
    """
    start, row, block, inside, mask = tile_rows(rows, SIZE, BLOCK, ROWS, BLOCKS)
    entry, written = _entries(
        positions_ptr, valid_ptr, page_table_ptr, layer_ptr, start + row, inside,
        TOKENS, HEADS, LENGTH, SEQUENCES, PAGES, LAYERS,
    )  # fmt: skip
    if tl.program_id(1) == 0:
        _append_fp4(
            k_ptr, k_words_ptr, k_scales_ptr, k_exponent_ptr,
            k_row_words_ptr, k_row_scales_ptr, k_row_exponent_ptr, k_low_bits_ptr,
            start, row, block, inside, mask, entry, written, SIZE, BLOCK, ROWS, MASKED,
        )  # fmt: skip
    else:
        _append_fp4(
            v_ptr, v_words_ptr, v_scales_ptr, v_exponent_ptr,
            v_row_words_ptr, v_row_scales_ptr, v_row_exponent_ptr, v_low_bits_ptr,
            start, row, block, inside, mask, entry, written, SIZE, BLOCK, ROWS, MASKED,
        )  # fmt: skip


@jit
def _append_fp4(
    x_ptr, words_ptr, scales_ptr, exponent_ptr, row_words_ptr, row_scales_ptr, row_exponent_ptr, low_bits_ptr,
    start, row, block, inside, mask, entry, written,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    words = load_rows(x_ptr, start, row, block, mask, SIZE, BLOCK, MASKED)
    codes, byte, exponent = quantized_rows(words, ROWS, BLOCK)
    store_fp4(
        row_words_ptr + start * (SIZE // 8), row_scales_ptr + start * (SIZE // BLOCK), row_exponent_ptr + start,
        codes, byte, exponent, row, block, inside, mask, SIZE, BLOCK, MASKED,
    )  # fmt: skip
    store_low_bits(low_bits_ptr, codes, start, row, block, mask, SIZE, BLOCK)
    store_fp4(
        words_ptr, scales_ptr, exponent_ptr, codes, byte, exponent, entry, block, written,
        mask & written[:, None], SIZE, BLOCK, True,
    )  # fmt: skip


@jit
def append_bf16_kernel(
    k_ptr, v_ptr, positions_ptr, valid_ptr, page_table_ptr, layer_ptr, k_in, v_in, rows, k_cache_ptr, v_cache_ptr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, LENGTH: tl.constexpr, SEQUENCES: tl.constexpr,
    PAGES: tl.constexpr, LAYERS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Copy rows [token, head] of k and v (grid axis 1) to the cache in place. BLOCK is 8: what a thread moves."""
    start, row, block, inside, mask = tile_rows(rows, SIZE, BLOCK, ROWS, BLOCKS)
    entry, written = _entries(
        positions_ptr, valid_ptr, page_table_ptr, layer_ptr, start + row, inside,
        TOKENS, HEADS, LENGTH, SEQUENCES, PAGES, LAYERS,
    )  # fmt: skip
    if tl.program_id(1) == 0:
        _copy_rows(k_ptr, k_cache_ptr, start, row, block, mask, entry, written, SIZE, BLOCK, MASKED)
    else:
        _copy_rows(v_ptr, v_cache_ptr, start, row, block, mask, entry, written, SIZE, BLOCK, MASKED)


@jit
def _copy_rows(
    x_ptr, cache_ptr, start, row, block, mask, entry, written,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    x_ptr = x_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + start * (SIZE // 2)
    cache_ptr = cache_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    column = block[None, :] * (BLOCK // 2)
    words = load_block(x_ptr, row[:, None] * (SIZE // 2) + column, mask, MASKED, 1)
    store_words(cache_ptr, entry[:, None] * (SIZE // 2) + column, mask & written[:, None], True, words)


@jit
def _entries(
    positions_ptr, valid_ptr, page_table_ptr, layer_ptr, row, inside,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, LENGTH: tl.constexpr, SEQUENCES: tl.constexpr,
    PAGES: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """The rows of the cache that rows [token, head] go to, int64, and which of them are written at all.

    The cache is [SEQUENCES, LENGTH, HEADS] rows per layer; with PAGES > 0 it has pages in the place of sequences.
    LAYERS is 0 for the cache of one layer.
    """
    token = row // HEADS
    position = tl.load(positions_ptr + token, mask=inside, other=-1)
    written = inside & (tl.load(valid_ptr + token, mask=inside, other=0) != 0) & (position >= 0)
    place = token // TOKENS
    if PAGES > 0:
        written = written & (position < PAGES * LENGTH)
        pointers = page_table_ptr + place * PAGES + position // LENGTH
        place = tl.load(pointers, mask=written, other=-1).to(tl.int64)
        written = written & (place >= 0) & (place < SEQUENCES)
        position = position % LENGTH
    else:
        written = written & (position < LENGTH)
    if LAYERS > 0:
        layer = tl.load(layer_ptr).to(tl.int64)
        written = written & (layer >= 0) & (layer < LAYERS)
        place += layer * SEQUENCES
    return (place * LENGTH + position) * HEADS + row % HEADS, written
