"""Triton kernels that quantize rows in one pass. Imports triton: loaded only where a kernel is called."""

import triton.language as tl

from kernels_pallas.triton_fp4 import first, load_block, second, store_words, to_bf16
from kernels_pallas.triton_jit import jit
from kernels_pallas.triton_rows import load_rows, quantized_rows, store_fp4, store_low_bits, tile_rows


@jit
def quantize_kernel(
    x_ptr, rows, words_ptr, scales_ptr, row_exponent_ptr, mantissa_ptr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    RECORD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Quantize BF16 rows; with RECORD also write the low bits of the codes."""
    start, row, block, inside, mask = tile_rows(rows, SIZE, BLOCK, ROWS, BLOCKS)
    words = load_rows(x_ptr, start, row, block, mask, SIZE, BLOCK, MASKED)
    _quantize_and_store(
        words, words_ptr, scales_ptr, row_exponent_ptr, mantissa_ptr, start, row, block, inside, mask,
        SIZE, BLOCK, ROWS, RECORD, MASKED,
    )  # fmt: skip


@jit
def rms_norm_quantize_kernel(
    x_ptr, gain_ptr, rows, h_ptr, words_ptr, scales_ptr, row_exponent_ptr, mantissa_ptr,
    EPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """RMSNorm of BF16 rows, rounded to BF16, and its quantization."""
    start, row, block, inside, mask = tile_rows(rows, SIZE, BLOCK, ROWS, BLOCKS)
    h_ptr = h_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + start * (SIZE // 2)
    gain_ptr = gain_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    offsets = row[:, None] * (SIZE // 2) + block[None, :] * (BLOCK // 2)
    words = load_rows(x_ptr, start, row, block, mask, SIZE, BLOCK, MASKED)
    squares = tl.zeros([ROWS, BLOCKS], tl.float32)
    for i in tl.static_range(len(words)):
        a, b = first(words[i]), second(words[i])
        squares = tl.fma(a, a, tl.fma(b, b, squares))
    factor = tl.rsqrt(tl.sum(squares, axis=1) / SIZE + EPS)[:, None]
    column = block[None, :] * (BLOCK // 2)
    exists = (block < SIZE // BLOCK)[None, :]
    normed = ()
    for chunk in tl.static_range(BLOCK // 8):
        gain = load_block(gain_ptr, column + 4 * chunk, exists, MASKED, 1)
        h = ()
        for i in tl.static_range(4):
            word = words[4 * chunk + i]
            h = h + (to_bf16(first(word) * factor * first(gain[i]), second(word) * factor * second(gain[i])),)
        store_words(h_ptr, offsets + 4 * chunk, mask, MASKED, h)
        normed = normed + h
    _quantize_and_store(
        normed, words_ptr, scales_ptr, row_exponent_ptr, mantissa_ptr, start, row, block, inside, mask,
        SIZE, BLOCK, ROWS, True, MASKED,
    )  # fmt: skip


@jit
def _quantize_and_store(
    words, words_ptr, scales_ptr, row_exponent_ptr, mantissa_ptr, start, row, block, inside, mask,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RECORD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    codes, byte, row_exponent = quantized_rows(words, ROWS, BLOCK)
    store_fp4(
        words_ptr + start * (SIZE // 8), scales_ptr + start * (SIZE // BLOCK), row_exponent_ptr + start,
        codes, byte, row_exponent, row, block, inside, mask, SIZE, BLOCK, MASKED,
    )  # fmt: skip
    if RECORD:
        store_low_bits(mantissa_ptr, codes, start, row, block, mask, SIZE, BLOCK)
