"""Formats against ml_dtypes: rounding, scale bytes, codes, packing."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas import formats
from kernels_pallas.formats import MXFP4, NVFP4, get_format

ALL_BYTES = np.arange(256, dtype=np.uint8)


def test_get_format_names_the_allowed_formats():
    assert get_format("nvfp4") is NVFP4 and get_format("mxfp4") is MXFP4
    with pytest.raises(ValueError, match=r"'fp8'.*mxfp4.*nvfp4"):
        get_format("fp8")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_round_to_bf16_is_nearest_even_on_random_bits(rng, wrap):
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (rng.integers(0, 2**16, 1000, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([bits, ties]).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    actual = np.asarray(wrap(formats.round_to_bf16)(x := jnp.asarray(x)))
    # Compared as bits: a comparison of values would not see a subnormal that was flushed.
    nan = np.isnan(np.asarray(x))
    np.testing.assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    assert np.isnan(actual[nan]).all()


def test_round_to_bf16_survives_a_producers_cast_under_jit(rng):
    x = jnp.asarray(rng.standard_normal(4096), jnp.float32)
    fused = jax.jit(lambda x: formats.round_to_bf16((x * 1.7).astype(jnp.bfloat16)))(x)
    assert (np.asarray(fused).view(np.uint32) & 0xFFFF == 0).all()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float16, jnp.float8_e4m3fn])
def test_round_to_bf16_refuses_other_dtypes(dtype):
    with pytest.raises(TypeError, match="expected bfloat16 or float32"):
        formats.round_to_bf16(jnp.zeros(4, dtype))


def test_e4m3_scale_bytes_decode_exactly():
    decoded = np.asarray(formats.decode_scales(jnp.asarray(ALL_BYTES), NVFP4))
    expected = ALL_BYTES[:127].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(decoded[:127], expected)
    assert np.isnan(decoded[127:]).all(), "NaN, and negative bytes, which no quantizer writes"


def test_e8m0_scale_bytes_decode_exactly():
    decoded = np.asarray(formats.decode_scales(jnp.asarray(ALL_BYTES), MXFP4))
    expected = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(decoded[1:255], expected[1:255])  # byte 0 is a float32 subnormal
    assert np.isnan(decoded[255])


def test_e4m3_encoding_is_nearest_even_for_every_bf16_and_every_tie():
    bf16 = np.arange(0, 0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    values = ALL_BYTES[:127].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (values[1:] + values[:-1]) / 2
    near = np.concatenate([np.nextafter(ties, 0), np.nextafter(ties, np.float32(1e9))])
    x = np.concatenate([bf16, values, ties, near]).astype(np.float32)
    expected = np.minimum(x, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(np.asarray(formats.encode_e4m3(jnp.asarray(x))), expected)


@pytest.mark.parametrize("exponent", [0, 27, 116, 127, 140, 243])
def test_row_scale_is_a_power_of_two(exponent):
    scale = formats.row_scale(jnp.uint8(exponent)[None])[0]
    if exponent:
        assert float(scale) == 2.0 ** (exponent - 127)


ABOVE_2688 = np.nextafter(np.float32(2688), np.float32(1e9))


@pytest.mark.parametrize(
    ("amax", "expected"),
    [(2688.0, 0), (ABOVE_2688, 1), (1344.0, -1), (0.0, -100), (1e-40, -100), (3.3895314e38, 116)],
)
def test_row_exponent_of_amax(amax, expected):
    bits = jax.lax.bitcast_convert_type(jnp.float32([amax]), jnp.int32)
    assert int(formats.row_exponent_from_amax(bits)[0]) - 127 == expected


def test_codes_decode_to_e2m1():
    codes = np.arange(16, dtype=np.uint8)
    expected = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(formats.decode_codes(jnp.asarray(codes))), expected)
    np.testing.assert_array_equal(expected[:8], formats.E2M1_VALUES)


def test_every_scale_byte_rounds_every_midpoint_to_even():
    scales = formats.decode_scales(jnp.arange(1, 127, dtype=jnp.uint8), NVFP4)[:, None]
    middle = jnp.float32([m for m, _ in formats.MIDPOINTS])[None] * scales
    even = np.array([0, 2, 2, 4, 4, 6, 6])
    np.testing.assert_array_equal(
        np.asarray(formats.nearest_magnitude(middle, scales)), np.broadcast_to(even, middle.shape)
    )
    below, above = np.nextafter(middle, 0), np.nextafter(middle, np.float32(np.inf))
    low = np.broadcast_to(np.arange(7), middle.shape)
    np.testing.assert_array_equal(np.asarray(formats.nearest_magnitude(jnp.asarray(below), scales)), low)
    np.testing.assert_array_equal(np.asarray(formats.nearest_magnitude(jnp.asarray(above), scales)), low + 1)


PACKERS = {
    "codes": (formats.pack_codes, formats.unpack_codes, 16),
    "bits": (formats.pack_bits, formats.unpack_bits, 2),
    "two_bits": (formats.pack_two_bits, formats.unpack_two_bits, 4),
}


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", PACKERS)
def test_packing_round_trips(rng, name, axis):
    pack, unpack, values = PACKERS[name]
    x = rng.integers(0, values, (3, 16, 24), dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: unpack(pack(x, axis), axis))(x)), x)


def test_packing_order_is_low_first():
    assert int(formats.pack_codes(jnp.arange(1, 9, dtype=jnp.uint8))[0]) == 0x87654321
    assert int(formats.pack_bits(jnp.uint8([1, 1, 0, 0, 0, 0, 0, 1]))[0]) == 0b10000011
    assert int(formats.pack_two_bits(jnp.uint8([3, 0, 2, 1]))[0]) == 0b01100011


def test_packing_agrees_with_xlas_own_e2m1_bitcast(rng):
    codes = rng.integers(0, 16, (4, 16), dtype=np.uint8)
    words = formats.pack_codes(jnp.asarray(codes))
    values = jax.lax.bitcast_convert_type(words, jnp.float4_e2m1fn).reshape(codes.shape)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(values.astype(jnp.float32)), expected)


def test_packing_refuses_a_size_that_is_no_whole_word():
    with pytest.raises(ValueError, match=r"size 12 .*multiple of 8"):
        formats.pack_codes(jnp.zeros((2, 12), jnp.uint8))
