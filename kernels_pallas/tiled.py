"""FP4 weights rearranged for tensor cores of NVIDIA GPUs: a copy that is made at weight sync and stored nowhere.

A warp multiplies 16 columns of a weight (the rows of its transpose) by 16 values of K at a time, and each of its
threads holds fixed elements of that tile. In an `Fp4Array` these lie far apart; here the words of four such tiles are
the 16 bytes that the thread loads. The order of K within a tile is free if activations follow it: `tile_order`.

In a word the 8 codes lie so that BF16 pairs come out of it with a shift and a mask: a code's sign and its three other
bits belong at bits 15 and 8..6 of a BF16 number that is then 2^-126 times the value. NVFP4's scale bytes get 5 exponent
bits, so that their decoding has no case for subnormals.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped, UInt8, UInt32

from kernels_pallas.arrays import Fp4Array, pytree_dataclass
from kernels_pallas.formats import Fp4Format

COLUMNS, DEPTH = 16, 64
"""Columns and values of K whose codes lie together: a unit of 128 words."""
MULTIPLE = 128
"""K and N are filled up to a multiple of this with zeros."""

# Bit in a 16-bit half of each bit of a code (sign, two exponent bits, mantissa), for the four codes in it.
_POSITIONS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


@pytree_dataclass(static=("format", "size", "gated"))
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TiledFp4Array:
    """Weights `[..., K, N]` in FP4, in units of 16 columns by 64 values of K.

    Attributes:
      words: uint32 [..., N' / 16, K' / 64, 128], K' and N' being K and N filled up.
      scales: uint8 [..., N' / 16, K' / 64, 1024 / block].
      row_exponent: uint8 [...], one per matrix.
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
        """The tensor that this was made from, bit for bit."""
        words = _gather_bits(self.words, forward=False).reshape(*self.words.shape[:-1], 8, 4, 2, 2)
        words = _join(words, "n J g q j a -> J j q n a g")
        block = self.format.block
        scales = self.scales.reshape(*self.scales.shape[:-1], 8, 32 // block, 2, 2)
        scales = _join(scales, "n J g b j a -> J j b n a g")
        if self.format.scale_dtype == "e4m3":
            scales = _narrow(scales)
        k, n = self.size
        return Fp4Array(
            words=_ungate(words, n, self.gated)[..., : k // 8, :],
            scales=_ungate(scales, n, self.gated)[..., : k // block, :],
            row_exponent=self.row_exponent,
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
    block = w.format.block
    k = -(-w.shape[-2] // MULTIPLE) * MULTIPLE
    words = _gate(_fill(w.words, k // 8), gated)
    n = words.shape[-1]
    words = words.reshape(*words.shape[:-2], k // DEPTH, 2, 4, n // COLUMNS, 2, 8)
    words = _split(words, "J j q n a g -> n J g q j a")
    scales = _gate(_fill(w.scales, k // block), gated)
    if w.format.scale_dtype == "e4m3":
        scales = _widen(scales)
    scales = scales.reshape(*scales.shape[:-2], k // DEPTH, 2, 32 // block, n // COLUMNS, 2, 8)
    scales = _split(scales, "J j b n a g -> n J g b j a")
    return TiledFp4Array(
        words=_gather_bits(words, forward=True),
        scales=scales,
        row_exponent=w.row_exponent,
        format=w.format,
        size=w.shape[-2:],
        gated=gated,
    )


def tile_order(x: Shaped[Array, "... k"]) -> Shaped[Array, "... k2"]:
    """Activations in the order of K, and filled up to the multiple, that tiled weights have."""
    k = -(-x.shape[-1] // MULTIPLE) * MULTIPLE
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, k - x.shape[-1])])
    # A word holds 8 neighbours of K, which thread q of four multiplies in two tiles, two of their halves each.
    x = x.reshape(*x.shape[:-1], k // 32, 4, 4, 2)
    return jnp.swapaxes(x, -3, -2).reshape(*x.shape[:-4], k)


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


def _split(x: Array, spec: str) -> Array:
    """Axes J j q n a g in units: `[..., n, J, g x q x j x a]`."""
    x = _permuted(x, spec)
    return x.reshape(*x.shape[:-4], -1)


def _join(x: Array, spec: str) -> Array:
    """The inverse: `[..., J x j x q, n x a x g]`."""
    x = _permuted(x, spec)
    rows = x.shape[-6] * x.shape[-5] * x.shape[-4]
    return x.reshape(*x.shape[:-6], rows, -1)


def _gather_bits(words: UInt32[Array, "..."], *, forward: bool) -> UInt32[Array, "..."]:
    """Code 2 p + i of a word to place p of its half i, or back."""
    out = jnp.zeros_like(words)
    for code in range(8):
        for bit, place in zip((3, 2, 1, 0), _POSITIONS[code // 2], strict=True):
            source, target = 4 * code + bit, 16 * (code % 2) + place
            if not forward:
                source, target = target, source
            out = out | (((words >> source) & 1) << target)
    return out


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


def operand_shape(w: TiledFp4Array) -> jax.ShapeDtypeStruct:
    """Shape of the decoded weights `[..., N', K']`, in tile order."""
    k, n = w.padded
    return jax.ShapeDtypeStruct((*w.words.shape[:-3], n, k), jnp.bfloat16)
