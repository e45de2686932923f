"""FP4 weights rearranged for tensor cores of NVIDIA GPUs: a copy that is made at weight sync and stored nowhere.

A warp multiplies 16 columns of a weight (the rows of its transpose) by 16 values of K at a time; each of its threads
holds 8 elements of that tile: of two columns, 8 apart, two pairs of neighbours along K, 8 apart. In an `Fp4Array` these
lie in four words; here they are one word, and the words of four tiles the 16 bytes that the thread loads.

In a word the 8 codes lie so that BF16 pairs come out of it with a rotation and a mask: a code's sign and its three
other bits belong at bits 15 and 8..6 of a BF16 number that is then 2^-126 times the value. Scale bytes are stored as
BF16 needs them. NVFP4's get 5 exponent bits, so that their decoding has no case for subnormals. MXFP4's are exponents
that make up for the 2^-126: up to 2^1, beyond which a power of two is taken out of all scales of the matrix. Then those
that are more than 2^133 smaller than the largest leave BF16's range, and their products are 0.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8, UInt32

from kernels_pallas.arrays import Fp4Array, pytree_dataclass
from kernels_pallas.formats import Fp4Format, poisoned

COLUMNS, DEPTH = 16, 64
"""Columns and values of K whose codes lie together: a unit of 128 words."""
MULTIPLE = 128
"""K and N are filled up to a multiple of this with zeros."""
EXACT_BELOW = 133
"""MXFP4: scales down to this many powers of two below a matrix's largest are exact whatever that is."""

# Bits of each pair's lower code (sign, two exponent bits, mantissa); the upper code's are 16 further, modulo 32. They
# get to their places by rotations by 0, 6, -4; the last pair's by 2, but for one, by -6. No four rotations do.
_POSITIONS = ((15, 8, 7, 6), (9, 2, 1, 0), (19, 12, 11, 10), (13, 14, 5, 4))


@pytree_dataclass(static=("format", "size", "gated"))
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TiledFp4Array:
    """Weights `[..., K, N]` in FP4, in units of 16 columns by 64 values of K.

    Attributes:
      words: uint32 [..., N' / 16, K' / 64, 128], K' and N' being K and N filled up.
      scales: uint8 [..., N' / 16, K' / 64, 64], one for a column and 16 values of K (MXFP4's are there twice).
      row_exponent: uint8 [...], one per matrix, of the power of two that its products are still to be multiplied by.
      format: static.
      size: static, (K, N).
      gated: static; columns are a gate and an up projection side by side, stored in turns of 8.
    """

    words: Any
    scales: Any
    row_exponent: Any
    format: Fp4Format
    size: tuple[int, int]
    gated: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, in values."""
        return (*self.words.shape[:-3], *self.size)

    @property
    def ndim(self) -> int:
        return len(self.words.shape) - 1

    @property
    def padded(self) -> tuple[int, int]:
        """K' and N'."""
        return self.words.shape[-2] * DEPTH, self.words.shape[-3] * COLUMNS

    def untile(self) -> Fp4Array:
        """The quantized tensor that this was made from, bit for bit."""
        k, n = self.size
        block = self.format.block
        pairs = _pairs(self.words)
        pairs = pairs.reshape(*pairs.shape[:-2], 8, 4, 4, 2, 2)  # row, quad, tile, half of K, half of columns
        words = lax.bitcast_convert_type(_permuted(pairs, "n J g q t h a -> J t h n a g q"), jnp.uint32)
        words = words.reshape(*words.shape[:-6], -1, words.shape[-3] * COLUMNS)
        scales = _permuted(self.scales.reshape(*self.scales.shape[:-1], 8, 4, 2), "n J g t a -> J t n a g")
        scales = scales.reshape(*scales.shape[:-5], -1, scales.shape[-3] * COLUMNS)[..., :: block // 16, :]
        row_exponent = self.row_exponent
        if self.format.scale_dtype == "e4m3":
            scales = _narrow(scales)
        else:
            scales, row_exponent = _raised(scales, row_exponent)
        return Fp4Array(
            words=_ungate(words, n, self.gated)[..., : k // 8, :],
            scales=_ungate(scales, n, self.gated)[..., : k // block, :],
            row_exponent=row_exponent,
            format=self.format,
            axis=-2,
        )


def tile(w: Fp4Array, *, gated: bool = False) -> TiledFp4Array:
    """Rearrange weights `[..., K, N]` whose row scales are one per matrix.

    `gated`: the columns are a gate's, then those of an up projection (an even number).

    Raises ValueError for other tensors.
    """
    w.check()
    if w.axis != -2 or w.row_exponent.ndim != w.ndim - 2:
        raise ValueError(
            f"cannot tile an Fp4Array along axis {w.axis} with row exponents {w.row_exponent.shape}; expected weights "
            "[..., K, N] along axis -2 with one row scale per matrix"
        )
    if gated and w.shape[-1] % 2:
        raise ValueError(
            f"{w.shape[-1]} columns cannot be a gate and an up projection; expected an even number"
        )
    k = -(-w.shape[-2] // MULTIPLE) * MULTIPLE
    # Quantizers write code 0 under scales 0 and NaN; whatever else is there must not show under a widened scale.
    void = poisoned(w.scales, w.format)
    if w.format.scale_dtype == "e4m3":
        void |= w.scales == 0
    words = jnp.where(jnp.repeat(void, w.format.block // 8, axis=-2), jnp.uint32(0), w.words)
    words = _gate(_fill(words, k // 8), gated)
    n = words.shape[-1]
    pairs = lax.bitcast_convert_type(words, jnp.uint8).reshape(
        *words.shape[:-2], k // DEPTH, 4, 2, n // COLUMNS, 2, 8, 4
    )
    pairs = _permuted(pairs, "J t h n a g q -> n J g q t h a")
    scales, row_exponent = w.scales, w.row_exponent
    if w.format.scale_dtype == "e4m3":
        scales = _widen(scales)
    else:
        scales, row_exponent = _lowered(scales)
    scales = _gate(_fill(jnp.repeat(scales, w.format.block // 16, axis=-2), k // 16), gated)
    scales = scales.reshape(*scales.shape[:-2], k // DEPTH, 4, n // COLUMNS, 2, 8)
    scales = _permuted(scales, "J t n a g -> n J g t a")
    return TiledFp4Array(
        words=_words(pairs.reshape(*pairs.shape[:-5], 128, 4)),
        scales=scales.reshape(*scales.shape[:-3], 64),
        row_exponent=row_exponent,
        format=w.format,
        size=w.shape[-2:],
        gated=gated,
    )


def _fill(rows: Array, size: int) -> Array:
    """Rows along axis -2 up to `size`, with zeros: codes 0 under any scale are 0."""
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, size - rows.shape[-2]), (0, 0)])


def _gate(x: Array, gated: bool) -> Array:
    """Columns filled up to the multiple; a gate's and an up projection's in turns of 8."""
    parts = 2 if gated else 1
    x = x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts)
    size = -(-x.shape[-1] * parts // MULTIPLE) * MULTIPLE // parts
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    x = x.reshape(*x.shape[:-1], size // 8, 8)
    return jnp.swapaxes(x, -3, -2).reshape(*x.shape[:-3], parts * size)


def _ungate(x: Array, columns: int, gated: bool) -> Array:
    parts = 2 if gated else 1
    x = jnp.swapaxes(x.reshape(*x.shape[:-1], -1, parts, 8), -3, -2)
    x = x.reshape(*x.shape[:-3], parts, -1)[..., : columns // parts]
    return x.reshape(*x.shape[:-2], columns)


def _permuted(x: Array, spec: str) -> Array:
    before, after = (side.split() for side in spec.split("->"))
    lead = x.ndim - len(before)
    return x.transpose(*range(lead), *(lead + before.index(name) for name in after))


def _words(pairs: UInt8[Array, "... 4"]) -> UInt32[Array, "..."]:
    """Pairs of codes, one a byte, in their places of a word."""
    word = jnp.zeros(pairs.shape[:-1], jnp.uint32)
    for pair, places in enumerate(_POSITIONS):
        byte = pairs[..., pair].astype(jnp.uint32)
        for i in range(2):
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                word = word | (((byte >> (4 * i + bit)) & 1) << ((16 * i + place) % 32))
    return word


def _pairs(words: UInt32[Array, "..."]) -> UInt8[Array, "... 4"]:
    """The inverse."""
    pairs = []
    for places in _POSITIONS:
        byte = jnp.zeros(words.shape, jnp.uint32)
        for i in range(2):
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                byte = byte | (((words >> ((16 * i + place) % 32)) & 1) << (4 * i + bit))
        pairs.append(byte.astype(jnp.uint8))
    return jnp.stack(pairs, axis=-1)


def _widen(scales: UInt8[Array, "..."]) -> UInt8[Array, "..."]:
    """E4M3 bytes >= 0 with 5 exponent bits and their bias moved by 15: subnormals become normal, 0 stays byte 0."""
    byte = scales.astype(jnp.int32)
    exponent = (byte >= 2).astype(jnp.int32) + (byte >= 4)  # of a subnormal, 1 to 7 times 2^-9
    subnormal = ((exponent + 13) << 3) | ((byte << (3 - exponent)) & 7)
    wide = jnp.where(byte >= 8, byte + 120, jnp.where(byte == 0, 0, subnormal))
    return jnp.where(byte >= 0x7F, 0xFF, wide).astype(jnp.uint8)


def _narrow(wide: UInt8[Array, "..."]) -> UInt8[Array, "..."]:
    byte = wide.astype(jnp.int32)
    subnormal = lax.shift_right_logical(8 + (byte & 7), jnp.clip(16 - (byte >> 3), 0, 3))
    narrow = jnp.where(byte >= 128, byte - 120, jnp.where(byte == 0, 0, subnormal))
    return jnp.where(byte == 0xFF, 0x7F, narrow).astype(jnp.uint8)


def _lowered(scales: UInt8[Array, "... k n"]) -> tuple[UInt8[Array, "... k n"], UInt8[Array, "..."]]:
    """E8M0 bytes as exponents of BF16 scales x 2^126, and the exponent byte of what is taken out of a matrix's."""
    byte = scales.astype(jnp.int32)
    taken = jnp.maximum(jnp.max(jnp.where(byte == 0xFF, 0, byte), axis=(-2, -1)) - 128, 0)
    lowered = jnp.where(byte == 0xFF, 0xFF, byte + 126 - taken[..., None, None])
    return lowered.astype(jnp.uint8), (127 + taken).astype(jnp.uint8)


def _raised(
    lowered: UInt8[Array, "... k n"], exponent: UInt8[Array, "..."]
) -> tuple[UInt8[Array, "... k n"], UInt8[Array, "..."]]:
    byte = lowered.astype(jnp.int32)
    scales = jnp.where(byte == 0xFF, 0xFF, byte - 253 + exponent.astype(jnp.int32)[..., None, None])
    return scales.astype(jnp.uint8), jnp.full(exponent.shape, 127, jnp.uint8)
