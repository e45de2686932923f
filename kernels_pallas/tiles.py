"""FP4 weight tiles inside Pallas TPU kernels: packed words and scale bytes to BF16 GEMM operands.

A tile is words uint32 [K / 8, N] and scales uint8 [K / block, N]. What it becomes is exact: code x block scale has at
most 6 significant bits, and no form used here goes through a BF16 or FP32 subnormal, which TPUs flush to zero.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Int32, Shaped, UInt8, UInt32

from kernels_pallas.formats import Fp4Format, decode_scales

NATIVE_FP4 = 7  # generation from which the vector unit converts float4_e2m1fn
NATIVE_BF16 = 6  # generation from which it multiplies BF16
LANES = 128
SUBLANES = 8
GROUP = 16  # values along K that `permuted` reorders among themselves


def unit(generation: int) -> float:
    """What products with `decoded` must be multiplied by: a power of two, for the accumulator."""
    return 1.0 if generation >= NATIVE_FP4 else 2.0**10


def permuted(x: Shaped[Array, "... k"], generation: int) -> Shaped[Array, "... k"]:
    """`x` with its last axis in the order of the rows of `decoded`: in each 16 the even ones first, before v7x."""
    if generation >= NATIVE_FP4:
        return x
    pairs = x.reshape(*x.shape[:-1], -1, GROUP // 2, 2)
    return pairs.swapaxes(-1, -2).reshape(x.shape)


def stage_scales(
    scales: UInt8[Array, "blocks n"],
    staged: Any,
    format: Fp4Format,
    generation: int,
    left: Int32[Array, ""] | None,
) -> None:
    """Scale bytes in the form that `decoded` reads: `staged`, uint32 [chunks, n / 128, blocks / chunks, 128].


    Bytes from `left` on lie outside the tensor, whatever they are: they count as zero.
    """
    bits = scale_bits(scales, format)
    if left is not None:
        bits = jnp.where(lax.broadcasted_iota(jnp.int32, bits.shape, 0) < left, bits, jnp.uint32(0))
    bits = staged_form(bits, generation)
    chunks, lanes, blocks, _ = staged.shape
    for c in range(chunks):
        for n in range(lanes):
            staged[c, n] = bits[c * blocks : (c + 1) * blocks, n * LANES : (n + 1) * LANES]


def decoded(
    words: UInt32[Array, "words n"], staged: Any, format: Fp4Format, generation: int
) -> BFloat16[Array, "k n"]:
    """Code x block scale / `unit` in BF16, rows in the order of `permuted`; NaN throughout a poisoned block.

    `staged` is a chunk of `stage_scales`, [n / 128, blocks, 128].
    """
    lanes = range(staged.shape[0])
    if generation >= NATIVE_FP4:  # it broadcasts a row faster from registers, the others from memory
        held = jnp.concatenate([staged[n] for n in lanes], axis=1)
        return scaled_codes(words, held, format, generation)
    rows = [
        jnp.concatenate([jnp.broadcast_to(staged[n, i : i + 1], (8, LANES)) for n in lanes], axis=1)
        for i in range(staged.shape[1])
    ]
    return _scaled_codes(words, rows, format, generation)


def staged_form(bits: UInt32[Array, "blocks n"], generation: int) -> UInt32[Array, "blocks n"]:
    """`scale_bits` as `scaled_codes` multiplies by them: the BF16 twice, or the FP32 where BF16 is not multiplied."""
    return bits | (bits >> 16) if generation >= NATIVE_BF16 else bits


def scaled_codes(
    words: UInt32[Array, "words n"], scales: UInt32[Array, "blocks n"], format: Fp4Format, generation: int
) -> BFloat16[Array, "k n"]:
    """`decoded` with the scales of `staged_form` in registers."""
    rows = [jnp.broadcast_to(scales[i : i + 1], (8, scales.shape[1])) for i in range(scales.shape[0])]
    return _scaled_codes(words, rows, format, generation)


def _scaled_codes(words: Array, scales: list[Array], format: Fp4Format, generation: int) -> Array:
    """`scales` has a register row [8, n] per block, which serves 16 rows: a BF16 register, or two of FP32."""
    wide = generation < NATIVE_BF16
    values = code_values(words, generation)
    values = values if wide else values.astype(jnp.bfloat16)
    rows = []
    for i, bits in enumerate(scales):
        scale = pltpu.bitcast(bits, jnp.float32 if wide else jnp.bfloat16)
        scale = jnp.concatenate([scale] * (format.block // scale.shape[0]), axis=0)
        block = values[i * format.block : (i + 1) * format.block] * scale
        rows.append(block.astype(jnp.bfloat16))
    return jnp.concatenate(rows, axis=0)


def code_values(words: UInt32[Array, "words n"], generation: int) -> Array:
    """Values of the codes / `unit`, [8 words, n] in the order of `permuted`: BF16 on v7x, else FP32."""
    if generation >= NATIVE_FP4:
        return pltpu.bitcast(words, jnp.float4_e2m1fn).astype(jnp.bfloat16)
    # E4M3 with exponent bias 11, which the vector unit of v5e and v6e converts, has a code's bits next to each other
    # and E2M1's subnormal as a subnormal of its own, which that conversion keeps (XLA converts E4M3FN by it). Its byte
    # 0x80 is NaN: a code 8 (-0) loses its sign first.
    magnitude = words & jnp.uint32(0x77777777)
    sign = words & (magnitude + jnp.uint32(0x77777777))
    even = ((magnitude << 2) & jnp.uint32(0x1C1C1C1C)) | ((sign << 4) & jnp.uint32(0x80808080))
    odd = ((magnitude >> 2) & jnp.uint32(0x1C1C1C1C)) | (sign & jnp.uint32(0x80808080))
    halves = [
        pltpu.bitcast(half, jnp.float8_e4m3b11fnuz).astype(jnp.float32).reshape(-1, 8, words.shape[1])
        for half in (even, odd)
    ]
    return jnp.stack(halves, axis=1).reshape(-1, words.shape[1])


def scale_bits(scales: UInt8[Array, "blocks n"], format: Fp4Format) -> UInt32[Array, "blocks n"]:
    """float32 bits of each block scale, whose low halves are zero since it is a BF16 number; NaN where poisoned."""
    if format.scale_dtype == "e8m0":
        byte = scales.astype(jnp.int32)
        nan = ((byte + 1) >> 8) << 22  # 255 has Inf's bits but for this one; byte 0, 2^-127, becomes 0
        return pltpu.bitcast((byte << 23) | nan, jnp.uint32)
    if scales.shape[0] % 4:
        return pltpu.bitcast(decode_scales(scales.astype(jnp.int32), format), jnp.uint32)
    # Four bytes at a time: those with the sign bit become 0xFF, NaN like 0x7F.
    packed = pltpu.bitcast(scales, jnp.uint32)
    negative = packed & jnp.uint32(0x80808080)
    packed = packed | (negative - (negative >> 7))
    value = pltpu.bitcast(packed, jnp.float8_e4m3fn).astype(jnp.float32)
    return pltpu.bitcast(value, jnp.uint32)
