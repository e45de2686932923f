"""Number formats: E2M1 codes, E4M3 and E8M0 block scales, power-of-two row scales, and their packing.

Everything here is exact on every backend: exponents are read from bits, products have few enough significant
bits to be exact in float32, and nothing is divided (float32 division is not correctly rounded on GPUs). Codes
and scale bytes are int32 here, which every backend computes with, Pallas kernels on TPUs included; they become
uint8 where they are stored. The rule numbers in the docstrings are those of the numeric contract.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Integer, Shaped, UInt8, UInt32

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each 3-bit code; bit 3 of a 4-bit code is the sign."""

MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)
"""Midpoints of neighbouring E2M1 magnitudes, and whether a tie goes up (to the even code)."""

INFINITY_BITS = 0x7F800000  # float32 bits of a magnitude at or above this are Inf or NaN
ROW_EXPONENT_BIAS = 127
MIN_EXPONENT, MAX_ROW_EXPONENT, MAX_MXFP4_EXPONENT = -100, 116, 125


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp4Format:
    """A block format of E2M1 codes.

    Attributes:
      name: "nvfp4" or "mxfp4".
      block: values that share one scale byte, along the contraction axis.
      scale_dtype: "e4m3" or "e8m0", the meaning of a scale byte.
      has_row_scale: whether a row carries a power-of-two scale of its own (else its exponent byte is 127,
        2^0).
    """

    name: str
    block: int
    scale_dtype: str
    has_row_scale: bool

    @property
    def poison(self) -> int:
        """Scale byte of a block that held NaN or Inf (rule 4)."""
        return 0x7F if self.scale_dtype == "e4m3" else 0xFF

    @property
    def scale_range(self) -> tuple[int, int]:
        """Smallest and largest scale byte a quantizer writes for a finite block."""
        if self.scale_dtype == "e4m3":
            return 0, 126
        return MIN_EXPONENT + ROW_EXPONENT_BIAS, MAX_MXFP4_EXPONENT + ROW_EXPONENT_BIAS


NVFP4 = Fp4Format(name="nvfp4", block=16, scale_dtype="e4m3", has_row_scale=True)
MXFP4 = Fp4Format(name="mxfp4", block=32, scale_dtype="e8m0", has_row_scale=False)
_FORMATS = {f.name: f for f in (NVFP4, MXFP4)}


def get_format(name: str) -> Fp4Format:
    """The format called `name`; ValueError with the allowed names otherwise."""
    if name not in _FORMATS:
        raise ValueError(f"unknown FP4 format {name!r}; expected one of {sorted(_FORMATS)}")
    return _FORMATS[name]


# --- rounding and bits ----------------------------------------------------------------------------


def round_to_bf16(x: Shaped[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """`x` rounded to nearest-even BF16, held in float32. TypeError for other than float64, float32, bfloat16.

    An explicit `reduce_precision`: XLA removes a float32 -> bfloat16 -> float32 pair of casts, and the value
    is then not rounded at all. BFloat16 input needs it too, since it may be the first half of such a pair.
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
        raise TypeError(
            f"cannot quantize {x.dtype} values; expected bfloat16 or float32: cast the input first"
        )
    wide = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    return lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7).astype(jnp.float32)


def signed_bits(x: Shaped[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """float32 bits of `round_to_bf16(x)` as int32 (negative where the sign bit is set)."""
    return lax.bitcast_convert_type(round_to_bf16(x), jnp.int32)


def from_bits(bits: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The float32 whose bits these are."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def power_of_two(exponent: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """2^exponent as float32, exponent in [-126, 127], built from bits."""
    return from_bits((exponent + 127) << 23)


def row_scale(row_exponent: Integer[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """2^(byte - 127), the row scale (rule 1)."""
    return power_of_two(row_exponent.astype(jnp.int32) - ROW_EXPONENT_BIAS)


def _ceil_log2_ratio(bits: Int32[Array, "*shape"], divisor: float) -> Int32[Array, "*shape"]:
    """ceil(log2(v / divisor)) from the float32 bits of v; only meaningful where v is normal."""
    exponent, mantissa = 0, divisor
    while mantissa >= 2.0:
        exponent, mantissa = exponent + 1, mantissa / 2.0
    threshold = int((mantissa - 1.0) * 2**23)
    return (bits >> 23) - 127 - exponent + ((bits & 0x7FFFFF) > threshold).astype(jnp.int32)


def row_exponent_from_amax(
    amax_bits: Int32[Array, "*shape"], divisor: float = 2688.0
) -> Int32[Array, "*shape"]:
    """Exponent byte e + 127 of the row scale, e = clip(ceil(log2(amax / divisor)), -100, 116) (rule 1).

    `amax_bits` are the float32 bits of the row's largest finite magnitude. 2688 = 6 x 448; zero and subnormal
    amax fall below the clip.
    """
    e = jnp.clip(_ceil_log2_ratio(amax_bits, divisor), MIN_EXPONENT, MAX_ROW_EXPONENT)
    return e + ROW_EXPONENT_BIAS


# --- block scales ---------------------------------------------------------------------------------


def encode_e4m3(value: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """E4M3 byte of 0 <= value, nearest even, clipped to 448 first, subnormals kept (rule 2)."""
    value = jnp.minimum(value, 448.0)
    bits = lax.bitcast_convert_type(value, jnp.int32)
    # Round the 23-bit mantissa to 3 bits (a carry moves on into the exponent), then change the exponent's
    # bias.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = jnp.round(value * 512.0).astype(jnp.int32)  # multiples of 2^-9; 8 is the first normal byte
    return jnp.where(value < 2.0**-6, subnormal, normal)


def encode_scales(
    block_amax: Float32[Array, "*shape"], format: Fp4Format, multiplier: float = 1 / 6
) -> Int32[Array, "*shape"]:
    """Scale byte of a finite block from its largest magnitude, in units of the row scale (rule 2).

    NVFP4: E4M3(min(amax x multiplier, 448)), `multiplier` taken as float32. MXFP4: the byte of 2^e,
    e = clip(ceil(log2(amax / 6)), -100, 125).
    """
    if format.scale_dtype == "e4m3":
        return encode_e4m3(block_amax * jnp.float32(multiplier))
    e = _ceil_log2_ratio(lax.bitcast_convert_type(block_amax, jnp.int32), 6.0)
    return jnp.clip(e, MIN_EXPONENT, MAX_MXFP4_EXPONENT) + ROW_EXPONENT_BIAS


def poisoned(scales: Integer[Array, "*shape"], format: Fp4Format) -> Bool[Array, "*shape"]:
    """Where a scale byte is not one of a finite block: NaN, or a negative E4M3 number."""
    return scales >= format.poison


def decode_scales(scales: Integer[Array, "*shape"], format: Fp4Format) -> Float32[Array, "*shape"]:
    """float32 value of each scale byte; NaN where `poisoned`."""
    byte = scales.astype(jnp.int32)
    if format.scale_dtype == "e4m3":
        value = jnp.where(byte < 8, byte.astype(jnp.float32) * 2.0**-9, from_bits((byte + (120 << 3)) << 20))
    else:
        value = from_bits(jnp.maximum(byte << 23, 0x400000))  # byte 0 is 2^-127
    return jnp.where(poisoned(scales, format), jnp.nan, value)


# --- E2M1 codes -----------------------------------------------------------------------------------


def nearest_magnitude(y: Float32[Array, "*shape"], scale: Float32[Array, "*scale"]) -> Int32[Array, "*out"]:
    """3-bit code of y >= 0 under a block scale: how many midpoint x scale products it exceeds (rule 3).

    The products are exact in float32, so ties are seen exactly and go to the even code. A NaN or infinite
    `scale` gives code 0 (callers pass Inf for scale 0), also of a y that has overflowed.
    """
    y = jnp.minimum(y, jnp.finfo(jnp.float32).max)  # Inf >= Inf
    code = jnp.int32(0)
    for midpoint, tie_up in MIDPOINTS:
        threshold = midpoint * scale
        code = code + (y >= threshold if tie_up else y > threshold).astype(jnp.int32)
    return code


def magnitude_value(code: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Value of a 3-bit code, by arithmetic: 0, .5, 1, 1.5, 2 | 3, 4 | 6 is linear between the bars."""
    halves = code + jnp.maximum(code - 4, 0) + 2 * jnp.maximum(code - 6, 0)
    return halves.astype(jnp.float32) * 0.5


def decode_codes(codes: Shaped[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Signed value of each 4-bit code (0..15, any integer dtype)."""
    code = codes.astype(jnp.int32)
    value = magnitude_value(code & 7)
    return jnp.where(code >= 8, -value, value)


# --- packing --------------------------------------------------------------------------------------


def _pack(values: Array, bits: int, dtype: jnp.dtype, axis: int) -> Array:
    """`values` (< 2^bits) along negative `axis` into words of `dtype`, the first value in the lowest bits."""
    count = dtype.itemsize * 8 // bits
    size = values.shape[axis]
    if size % count:
        raise ValueError(
            f"cannot pack axis {axis} of size {size} in shape {values.shape}: not a multiple of {count}"
        )
    split = (*values.shape[:axis], size // count, count, *values.shape[values.ndim + axis + 1 :])
    values = values.reshape(split).astype(jnp.uint32)
    word = jnp.uint32(0)
    for i in range(count):
        word = word | (lax.index_in_dim(values, i, values.ndim + axis, keepdims=False) << (bits * i))
    return word.astype(dtype)


def _unpack(words: Array, bits: int, axis: int) -> UInt8[Array, "..."]:
    count = words.dtype.itemsize * 8 // bits
    position = words.ndim + axis + 1
    split = (*words.shape[:position], count, *words.shape[position:])
    shifts = lax.broadcasted_iota(jnp.uint32, split, position) * bits
    values = (jnp.expand_dims(words.astype(jnp.uint32), position) >> shifts) & (2**bits - 1)
    shape = (*words.shape[: position - 1], words.shape[axis] * count, *words.shape[position:])
    return values.astype(jnp.uint8).reshape(shape)


def pack_codes(codes: UInt8[Array, "..."], axis: int = -1) -> UInt32[Array, "..."]:
    """4-bit codes into uint32 words of 8 along `axis` (negative), low nibble first."""
    return _pack(codes, 4, jnp.dtype(jnp.uint32), axis)


def unpack_codes(words: UInt32[Array, "..."], axis: int = -1) -> UInt8[Array, "..."]:
    """Inverse of `pack_codes`."""
    return _unpack(words, 4, axis)


def pack_bits(bits: UInt8[Array, "..."], axis: int = -1) -> UInt8[Array, "..."]:
    """Values 0 or 1 into bytes of 8 along `axis` (negative); bit i of a byte is its value i."""
    return _pack(bits, 1, jnp.dtype(jnp.uint8), axis)


def unpack_bits(packed: UInt8[Array, "..."], axis: int = -1) -> UInt8[Array, "..."]:
    """Inverse of `pack_bits`."""
    return _unpack(packed, 1, axis)


def pack_two_bits(values: UInt8[Array, "..."], axis: int = -1) -> UInt8[Array, "..."]:
    """Values 0..3 into bytes of 4 along `axis` (negative), the first value in the low bits."""
    return _pack(values, 2, jnp.dtype(jnp.uint8), axis)


def unpack_two_bits(packed: UInt8[Array, "..."], axis: int = -1) -> UInt8[Array, "..."]:
    """Inverse of `pack_two_bits`."""
    return _unpack(packed, 2, axis)
