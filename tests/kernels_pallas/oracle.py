"""The numeric contract in NumPy, float64 and ml_dtypes casts: an answer that shares no code with the package.

float64 holds every quotient of a BF16 value and a scale closely enough that the E2M1 cast of ml_dtypes sees
exact ties as ties and nothing else as one.
"""

import ml_dtypes
import numpy as np

from kernels_pallas.formats import Fp4Format


def to_bf16(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(ml_dtypes.bfloat16)


def ceil_log2(value: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(value)  # value = mantissa * 2^exponent, mantissa in [0.5, 1)
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def quantize_rows(x: np.ndarray, format: Fp4Format) -> dict[str, np.ndarray]:
    """Codes, scales, row exponent bytes and values (float64) of BF16 rows [R, K]."""
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
    blocks = wide.reshape(x.shape[0], -1, format.block)
    finite = np.where(np.isfinite(blocks), np.abs(blocks), 0.0)
    bad = ~np.isfinite(blocks).all(-1)
    with np.errstate(all="ignore"):
        if format.name == "nvfp4":
            amax = finite.max((1, 2))
            e = np.where(amax == 0, -100, np.clip(ceil_log2(np.where(amax == 0, 1, amax) / 2688), -100, 116))
            block_amax = np.ldexp(finite.max(-1), -e[:, None]).astype(np.float32)
            product = np.minimum(block_amax * np.float32(1 / 6), np.float32(448))
            scale = product.astype(ml_dtypes.float8_e4m3fn)
            scales, scale = scale.view(np.uint8), scale.astype(np.float64)
        else:
            e = np.zeros(x.shape[0], np.int64)
            amax = finite.max(-1)
            block_e = np.where(amax == 0, -100, ceil_log2(np.where(amax == 0, 1, amax) / 6)).clip(-100, 125)
            scales, scale = (block_e + 127).astype(np.uint8), np.ldexp(1.0, block_e)
        y = np.ldexp(np.where(np.isfinite(blocks), blocks, 0.0), -e[:, None, None])
        quotient = np.where(scale[..., None] > 0, y / scale[..., None], 0.0)
        codes = quotient.astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    values = codes.astype(np.float64)
    codes = np.where(values == 0, 0, codes.view(np.uint8))
    scales = np.where(bad, format.poison, scales).astype(np.uint8)
    codes = np.where(bad[..., None], 0, codes).astype(np.uint8)
    values = np.ldexp(values * scale[..., None], e[:, None, None])
    values = np.where(bad[..., None], np.nan, values)
    return {
        "codes": codes.reshape(x.shape),
        "scales": scales,
        "row_exponent": (e + 127).astype(np.uint8),
        "values": values.reshape(x.shape),
    }


GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def guided_codes(
    x: np.ndarray,
    scale: np.ndarray,
    row_exponent: np.ndarray,
    record_codes: np.ndarray,
    mode: str,
    format: Fp4Format,
) -> np.ndarray:
    """Codes of finite BF16 rows [R, K] under a record whose scales are given as float64 [R, K / block]."""
    wide = x.astype(np.float64)
    y = np.ldexp(np.abs(wide), 127 - row_exponent.astype(np.int64)[:, None])
    y = np.where(y < 2.0**-126, 0.0, y)
    s = np.repeat(scale, format.block, axis=-1)
    with np.errstate(all="ignore"):
        z = np.where(s > 0, y / s, 0.0)
    low = (z[..., None] >= GRID).sum(-1) - 1
    high = np.where((GRID[low] == z) | (low == 7), low, low + 1)
    if mode == "scale":
        code = np.minimum(z, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    elif mode == "mantissa":
        code = np.where(low % 2 == record_codes % 2, low, high)
    else:
        sign = np.where(np.signbit(wide), -1.0, 1.0)
        record = np.where(record_codes >= 8, -1, 1) * GRID[record_codes & 7]
        code = np.where(np.abs(sign * GRID[high] - record) < np.abs(sign * GRID[low] - record), high, low)
    return np.where(code == 0, 0, code + 8 * np.signbit(wide)).astype(np.uint8)
