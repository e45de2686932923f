"""The arithmetic that Triton kernels round with, in NumPy, over all cases that differ by more than a power of two."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import formats

SIGNIFICANDS = 1 + np.arange(128) / 128
EXPONENTS = np.arange(-16, 17)


def snapped(q):
    """`triton_fp4.snap`: FP16 bits of q x 2^-14, at most those of 6."""
    with np.errstate(over="ignore"):
        small = q.astype(np.float16) * np.float16(2.0**-14)
    return np.minimum(small, np.float16(6 * 2.0**-14)).view(np.uint16).astype(int)


@pytest.mark.parametrize("ulps", range(-6, 7))
@pytest.mark.parametrize("eighths", range(8))
def test_codes_and_neighbours_from_an_approximate_reciprocal(eighths, ulps):
    """Every BF16 significand under every E4M3 significand, the reciprocal off by some units in the last place."""
    scale = np.float32(1 + eighths / 8)
    x = (SIGNIFICANDS * np.ldexp(1.0, EXPONENTS)[:, None]).astype(np.float32)
    inverse = ((np.float32(1) / scale).view(np.int32) + np.int32(ulps)).view(np.float32)
    bits = snapped(x * inverse)

    nearest = np.asarray(formats.nearest_magnitude(jnp.asarray(x), jnp.asarray(scale)))
    np.testing.assert_array_equal((bits + 0xFF + (bits >> 9 & 1)) >> 9, nearest)

    value = np.asarray(formats.magnitude_value(jnp.asarray(nearest))) * scale
    bits = np.maximum(bits, 1)  # no x here counts as zero
    np.testing.assert_array_equal(bits >> 9, nearest - (x < value))
    np.testing.assert_array_equal((bits + 0x1FF) >> 9, np.minimum(nearest + (x > value), 7))


def test_scale_bytes_with_subnormal_numbers_rounded_by_fp32():
    """`triton_fp4.scale_byte` for every finite BF16, and the value of every byte."""
    amax = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    value = amax * np.float32(1 / 6)
    bits = (np.minimum(value, np.float32(448)) * np.float32(2.0**-120)).view(np.int32)
    expected = np.asarray(formats.encode_e4m3(jnp.asarray(value)))
    np.testing.assert_array_equal((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20, expected)

    byte = np.arange(formats.NVFP4.poison, dtype=np.int32)
    decoded = (byte << 20).view(np.float32) * np.float32(2.0**120)
    np.testing.assert_array_equal(
        decoded, np.asarray(formats.decode_scales(jnp.asarray(byte), formats.NVFP4))
    )
