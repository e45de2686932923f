"""Triton kernel of guided rounding, in one pass. Imports triton: loaded only where a kernel is called."""

import triton.language as tl

from kernels_pallas.triton_fp4 import (
    INFINITY,
    LOW_BIT,
    MAGNITUDES,
    POISON_E4M3,
    POISON_E8M0,
    SIGNS,
    block_amax,
    inverse_scale,
    larger_unsigned,
    load_block,
    load_two_words,
    nearest,
    scale_byte,
    scale_value,
    snap_word,
    store_words,
    values_of,
)
from kernels_pallas.triton_jit import jit
from kernels_pallas.triton_rows import block_bits, own_row_exponent, tile_rows


@jit
def guided_values_kernel(
    x_ptr, scales_ptr, row_exponent_ptr, valid_ptr, record_ptr, rows, values_ptr,
    MODE: tl.constexpr, COMPACT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Values of `guided_round`. MODE "own": of `quantize`; "scale", "mantissa", "full": those of `Guide`."""
    start, row, block, inside, mask = tile_rows(rows, SIZE, BLOCK, ROWS, BLOCKS)
    x_ptr = x_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + start * (SIZE // 2)
    values_ptr = values_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + start * (SIZE // 2)
    offsets = row[:, None] * (SIZE // 2) + block[None, :] * (BLOCK // 2)
    words = load_block(x_ptr, offsets, mask, MASKED, BLOCK // 8)
    amax = block_amax(words)
    row_exponent = own_row_exponent(words, amax, ROWS, BLOCK)
    poisoned = amax >= INFINITY
    if MODE == "own":
        byte = scale_byte(amax, row_exponent[:, None], BLOCK)
        usable = inside[:, None]
    else:
        recorded, usable = _recorded_scales(
            scales_ptr, valid_ptr, start, row, block, inside, mask, COMPACT, SIZE, BLOCK
        )
        if BLOCK == 16:
            theirs = tl.load(row_exponent_ptr + start + row, mask=inside, other=127).to(tl.int32)
            row_exponent = tl.where(usable, theirs, row_exponent)
        usable = usable[:, None]
        own = scale_byte(amax, row_exponent[:, None], BLOCK)
        if COMPACT:
            rebuilt = own + ((recorded - own + 1) & 3) - 1
            if BLOCK == 32:
                recorded = tl.minimum(tl.maximum(rebuilt, 27), 252)
            else:
                recorded = tl.minimum(tl.maximum(rebuilt, 0), 126)
        byte = tl.where(usable, recorded, own)
    inverse = inverse_scale(byte, row_exponent[:, None], BLOCK)
    scale = scale_value(byte, row_exponent[:, None], BLOCK).to(tl.uint32, bitcast=True)
    scale = tl.where(poisoned, 0x7FC07FC0, (scale & 0xFFFF0000) | (scale >> 16))
    least = _smallest_off_zero(byte, row_exponent[:, None], BLOCK)
    if MODE == "mantissa":
        pointers = block_bits(record_ptr, start, row, block, SIZE, BLOCK)
        bits = tl.load(pointers, mask=mask, other=0).to(tl.uint32)
    elif MODE == "full":
        record_ptr += start * (SIZE // 8)
        record_offsets = row[:, None] * (SIZE // 8) + block[None, :] * (BLOCK // 8)
        if BLOCK == 32:
            record = load_block(record_ptr, record_offsets, mask, MASKED, 1)
        else:
            record = load_two_words(record_ptr, record_offsets, mask, MASKED)
    for chunk in tl.static_range(BLOCK // 8):
        out = ()
        for i in tl.static_range(4):
            word = words[4 * chunk + i]
            snapped = snap_word(word, inverse)
            if MODE == "mantissa":
                theirs = (bits >> (8 * chunk)) & 0xFF
                theirs = ((theirs | (theirs << 15)) >> (2 * i)) & LOW_BIT
                rounded = _guided(snapped, word, theirs, least, usable, False)
            elif MODE == "full":
                theirs = record[chunk] >> (8 * i)
                theirs = (theirs & 0xF) | ((theirs << 12) & 0xF0000)
                rounded = _guided(snapped, word, theirs, least, usable, True)
            else:
                rounded = nearest(snapped)
            out = out + (values_of(((rounded >> 3) & 0x01C001C0) | (word & SIGNS), scale),)
        store_words(values_ptr, offsets + 4 * chunk, mask, MASKED, out)


@jit
def _recorded_scales(
    scales_ptr, valid_ptr, start, row, block, inside, mask,
    COMPACT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Recorded scale bytes, their two low bits if COMPACT, and which rows are usable."""
    usable = tl.load(valid_ptr + start + row, mask=inside, other=0) != 0
    if COMPACT:
        width: tl.constexpr = (SIZE // BLOCK + 3) // 4
        pointers = scales_ptr + start * width + row[:, None] * width + (block // 4)[None, :]
        recorded = tl.load(pointers, mask=mask, other=0).to(tl.int32)
        recorded = (recorded >> (2 * (block % 4))[None, :]) & 3
    else:
        width: tl.constexpr = SIZE // BLOCK
        pointers = scales_ptr + start * width + row[:, None] * width + block[None, :]
        recorded = tl.load(pointers, mask=mask, other=0).to(tl.int32)
        usable = usable & (tl.max(recorded, axis=1) < (POISON_E8M0 if BLOCK == 32 else POISON_E4M3))
    return recorded, usable


@jit
def _smallest_off_zero(byte, row_exponent, BLOCK: tl.constexpr):
    """BF16 bits of the smallest |x| that does not count as 0, in both halves: 2^(e - 126); none under scale 0."""
    if BLOCK == 32:
        least = tl.full(byte.shape, 0x00800080, tl.uint32)
    else:
        e = row_exponent - 127
        subnormal = 1 << tl.minimum(tl.maximum(e + 7, 0), 6)
        least = tl.where(e >= 0, (e + 1) << 7, subnormal)
        least = tl.where(byte == 0, 0x7FFF, least).to(tl.uint32) * LOW_BIT
    return least


@jit
def _guided(snapped, word, theirs, least, usable, FULL: tl.constexpr):
    """The neighbour that the record names (its low bit, or with FULL its code), the nearest where not `usable`."""
    # What underflowed to 0 but does not count as 0 lies just above it.
    off_zero = (((word | SIGNS) - least) >> 15) & LOW_BIT
    magnitude = larger_unsigned(snapped & MAGNITUDES, off_zero)
    odd = (magnitude >> 9) & LOW_BIT
    if FULL:
        # The upper neighbour is nearer only to a value at or beyond it, of the same sign.
        high = ((magnitude + 0x01FF01FF) >> 9) & 0x00070007
        beyond = ((theirs & 0x00070007) | SIGNS) - high
        take_high = ((beyond & ((theirs << 12) ^ word ^ SIGNS)) >> 15) & LOW_BIT
    else:
        take_high = odd ^ theirs
    # A carry out of the nine bits beyond a code makes it the upper neighbour, if there is anything in them.
    return magnitude + tl.where(usable, take_high * 0x1FF, odd + 0x00FF00FF)
