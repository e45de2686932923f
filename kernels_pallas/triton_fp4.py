"""Blocks of FP4 in Triton kernels: 16 or 32 BF16 values of one thread, two to a 32-bit word.

One thread holds whole blocks, a tensor `[rows, blocks]` per word of a block, so that all but the maximum of a row is
work within a thread. Arithmetic goes over two values at a time where it can: the throughput of integer instructions
is what limits these kernels.

Rounding (rule 3 of the numeric contract) without comparing against seven thresholds: q = x / (scale x row scale), from
an approximate reciprocal, is rounded to FP16 and multiplied by 2^-14. There E2M1's smallest normal number, 1, is
FP16's, so codes are FP16's bits without the lower nine, and rounding is that of an integer. It is exact although q is
not: x has 8 significant bits and midpoint x scale at most 7, so q lies on a midpoint or at least 2^-10 from it (2^-8 of
it beyond 1), which FP16 keeps apart, and an error of a few units in the last place of FP32 does not reach across.
Likewise for the values of codes. test_triton_rounding compares all cases.
"""

import triton.language as tl

from kernels_pallas.triton_jit import jit

LOW_BIT = tl.constexpr(0x00010001)  # of both halves of a word
MAGNITUDES = tl.constexpr(0x7FFF7FFF)
SIGNS = tl.constexpr(0x80008000)
INFINITY = tl.constexpr(0x7F80)  # BF16 magnitudes at or above this are Inf or NaN
POISON_E4M3, POISON_E8M0 = tl.constexpr(0x7F), tl.constexpr(0xFF)

# a, b >= 0 as FP32 -> FP16 pair of each x 2^-14, at most 6 x 2^-14, the first in the low half. Signs are kept.
SNAP = tl.constexpr(
    "{ .reg .b32 q, c; mov.b32 c, 0x04000400; cvt.rn.f16x2.f32 q, $2, $1; mul.rn.f16x2 q, q, c; "
    "mov.b32 c, 0x0E000E00; min.xorsign.abs.f16x2 $0, q, c; }"
)
# Larger magnitude, by halves; NaN if either is. The sign is that of the product, and of no use.
LARGER = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
# Approximate 1 / a of a normal number; Inf for 0.
RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
# Two FP32 to BF16, nearest even, the first in the low half.
TO_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
# Halves a with E2M1's value x 2^-126 in BF16, times BF16 scales b. Exact; adding 0 makes -0 a 0.
VALUES = tl.constexpr(
    "{ .reg .b32 v, c; mov.b32 c, 0x7E807E80; mul.rn.bf16x2 v, $1, c; mov.b32 c, 0; fma.rn.bf16x2 $0, v, $2, c; }"
)
# Larger unsigned half.
LARGER_UNSIGNED = tl.constexpr("max.u16x2 $0, $1, $2;")


@jit
def _two(asm: tl.constexpr, a, b):
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@jit
def float_of(bits):
    """The FP32 of these bits."""
    return bits.to(tl.float32, bitcast=True)


@jit
def first(word):
    """FP32 of the lower of two BF16."""
    return float_of(word << 16)


@jit
def second(word):
    """FP32 of the upper of two BF16."""
    return float_of(word & 0xFFFF0000)


@jit
def to_bf16(a, b):
    """A word of two FP32 values, rounded to BF16."""
    return tl.inline_asm_elementwise(TO_BF16, "=r,f,f", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@jit
def larger_unsigned(a, b):
    """By halves."""
    return _two(LARGER_UNSIGNED, a, b)


@jit
def values_of(codes, scale):
    """Two BF16 of two codes, each as E2M1 in the upper bits of a BF16 whose exponent is 126 too small."""
    return _two(VALUES, codes, scale)


@jit
def select_bits(mask: tl.constexpr, a, b):
    """Bits of a where the mask has ones, of b elsewhere."""
    return (a & mask) | (b & (mask ^ 0xFFFFFFFF))


# --- memory -------------------------------------------------------------------------------------


@jit
def load_words(pointer, offsets, mask, MASKED: tl.constexpr):
    """Four consecutive words from each of `offsets` `[rows, blocks]`: 16 bytes a thread."""
    pointers = pointer + offsets[:, :, None] + tl.arange(0, 4)[None, None, :]
    if MASKED:
        words = tl.load(pointers, mask=mask[:, :, None], other=0)
    else:
        words = tl.load(pointers)
    even, odd = tl.split(tl.reshape(words, [offsets.shape[0], offsets.shape[1], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@jit
def load_block(pointer, offsets, mask, MASKED: tl.constexpr, CHUNKS: tl.constexpr):
    """The words of blocks of 8 x CHUNKS values (two values a word) at `offsets` `[rows, blocks]`."""
    words = load_words(pointer, offsets, mask, MASKED)
    for chunk in tl.static_range(1, CHUNKS):
        words = words + load_words(pointer, offsets + 4 * chunk, mask, MASKED)
    return words


@jit
def load_two_words(pointer, offsets, mask, MASKED: tl.constexpr):
    """Two consecutive words from each of `offsets`."""
    pointers = pointer + offsets[:, :, None] + tl.arange(0, 2)[None, None, :]
    if MASKED:
        words = tl.load(pointers, mask=mask[:, :, None], other=0)
    else:
        words = tl.load(pointers)
    return tl.split(words)


@jit
def store_words(pointer, offsets, mask, MASKED: tl.constexpr, words):
    """Two or four words next to each other, at each of `offsets`."""
    if len(words) == 4:
        joined = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
        joined = tl.reshape(joined, [offsets.shape[0], offsets.shape[1], 4])
    else:
        joined = tl.join(words[0], words[1])
    pointers = pointer + offsets[:, :, None] + tl.arange(0, len(words))[None, None, :]
    if MASKED:
        tl.store(pointers, joined, mask=mask[:, :, None])
    else:
        tl.store(pointers, joined)


# --- scales -------------------------------------------------------------------------------------


@jit
def block_amax(words):
    """The largest magnitude of each block as the 15 bits of a BF16; NaN if it has one."""
    largest = _two(LARGER, words[0], words[1])
    for i in tl.static_range(2, len(words)):
        largest = _two(LARGER, largest, words[i])
    swapped = (largest >> 16) | (largest << 16)
    return (_two(LARGER, largest, swapped) & 0x7FFF).to(tl.int32)


@jit
def finite_word(word):
    """The word with halves that are Inf or NaN set to zero."""
    magnitude = word & MAGNITUDES
    finite = (((magnitude + 0x00800080) >> 15) & LOW_BIT) ^ LOW_BIT
    return magnitude & (finite * 0xFFFF)


@jit
def row_amax(words, amax):
    """The largest finite magnitude of each row."""
    largest = tl.max(amax, axis=1)
    if tl.max(largest, axis=0) >= INFINITY:  # rare, and the only case that looks at every value again
        finite = finite_word(words[0])
        for i in tl.static_range(1, len(words)):
            finite = _two(LARGER, finite, finite_word(words[i]))
        largest = tl.max(tl.maximum(finite & 0x7FFF, (finite >> 16) & 0x7FFF).to(tl.int32), axis=1)
    return largest


@jit
def row_exponent_of(amax):
    """Exponent byte of rows by their largest finite magnitude (rule 1): 2688 = 1.3125 x 2^11."""
    return tl.minimum(tl.maximum(((amax + 0x57) >> 7) - 11, 27), 243)


@jit
def scale_byte(amax, row_exponent, BLOCK: tl.constexpr):
    """Scale bytes of blocks by their largest magnitude (rule 2). Meaningless for a block with Inf or NaN."""
    if BLOCK == 32:
        byte = tl.minimum(tl.maximum(((amax + 0x3F) >> 7) - 2, 27), 252)
    else:
        value = float_of(amax << 16) * float_of((254 - row_exponent) << 23)
        value = tl.minimum(value * 0.1666666716337204, 448.0)  # FP32 of 1/6
        # E4M3's smallest normal number, 2^-6, becomes FP32's: rounding to three bits is that of an integer. Exact for
        # every BF16 `amax`, the double rounding of subnormal numbers included.
        bits = (value * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2^-120
        byte = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    return byte


@jit
def scale_value(byte, row_exponent, BLOCK: tl.constexpr):
    """Block scale x row scale of finite blocks, exact."""
    if BLOCK == 32:
        value = float_of(byte << 23)
    else:
        value = float_of(byte << 20) * 1.329227995784916e36 * float_of(row_exponent << 23)  # 2^120
    return value


@jit
def inverse_scale(byte, row_exponent, BLOCK: tl.constexpr):
    """About 1 / (block scale x row scale), 0 for scale 0."""
    if BLOCK == 32:
        inverse = float_of((254 - byte) << 23)
    else:
        value = scale_value(byte, row_exponent, BLOCK)
        inverse = tl.inline_asm_elementwise(
            RECIPROCAL, "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.where(byte == 0, 0.0, inverse)
    return inverse


# --- codes --------------------------------------------------------------------------------------


@jit
def snap(a, b, inverse):
    """Two values over their scale as FP16 x 2^-14, clipped to 6: code, and nine bits of what lies beyond it."""
    a, b = a * inverse, b * inverse
    return tl.inline_asm_elementwise(SNAP, "=r,f,f", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@jit
def snap_word(word, inverse):
    """`snap` of the two values of a word."""
    return snap(first(word), second(word), inverse)


@jit
def nearest(snapped):
    """Round to the nearest even code: bits 9 to 11 of each half."""
    return snapped + 0x00FF00FF + ((snapped >> 9) & LOW_BIT)


@jit
def code_word(a, b, c, d, inverse):
    """The codes of 8 values, two to a word, as one word (rule 3)."""
    # Halves of a result are four values apart, so that they lie apart in it as they do here.
    p = nearest(snap(first(a), first(c), inverse))
    q = nearest(snap(second(a), second(c), inverse))
    r = nearest(snap(first(b), first(d), inverse))
    s = nearest(snap(second(b), second(d), inverse))
    low = select_bits(0x000F000F, p >> 9, q >> 5)
    high = select_bits(0x0F000F00, r >> 1, s << 3)
    codes = select_bits(0x00FF00FF, low, high)
    low = select_bits(0x00080008, p >> 12, q >> 8)
    high = select_bits(0x08000800, r >> 4, s)
    signs = select_bits(0x00FF00FF, low, high)
    # Adding 7 sets a nibble's upper bit unless its code is 0, which has no sign (rule 3).
    return codes | (signs & (codes + 0x77777777) & 0x88888888)


@jit
def low_bits(word):
    """Low bits of 8 codes, four at 9 to 12 and four at 25 to 28. Products move bits next to each other: unlike shifts
    they do not compete with logical operations."""
    bits = (word & 0x11111111) * 0x09 & 0x18181818
    return bits * 0x41 & 0x1E001E00


@jit
def low_bits_of_two(a, b):
    """Low bits of the 16 codes of two words, in order: two bytes of `formats.pack_bits`."""
    bits = (low_bits(a) >> 9) | (low_bits(b) >> 1)
    return (bits | (bits >> 12)) & 0xFFFF


@jit
def quantize_block(words, amax, row_exponent, BLOCK: tl.constexpr):
    """Code words and scale bytes of blocks under the given row exponents (rules 2 to 4)."""
    byte = scale_byte(amax, row_exponent, BLOCK)
    inverse = inverse_scale(byte, row_exponent, BLOCK)
    poisoned = amax >= INFINITY
    byte = tl.where(poisoned, POISON_E8M0 if BLOCK == 32 else POISON_E4M3, byte)
    codes = (tl.where(poisoned, 0, code_word(words[0], words[1], words[2], words[3], inverse)),)
    for i in tl.static_range(1, BLOCK // 8):
        w = code_word(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], inverse)
        codes = codes + (tl.where(poisoned, 0, w),)
    return codes, byte


@jit
def packed_low_bits(codes):
    """Low bits of a block's codes: 16 or 32 bits, as many as codes."""
    bits = low_bits_of_two(codes[0], codes[1])
    if len(codes) == 4:
        bits = bits | (low_bits_of_two(codes[2], codes[3]) << 16)
    return bits
