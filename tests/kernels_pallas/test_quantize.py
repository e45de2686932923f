"""Quantize and dequantize: exact answers, an independent oracle, and properties."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.formats import MXFP4, NVFP4, Fp4Format
from kernels_pallas.quantize import dequantize, operand, quantize, quantize_codes
from kernels_pallas.quantize.api import IMPLEMENTATIONS
from kernels_pallas.quantize.shapes import SHAPES
from tests.kernels_pallas import oracle
from tests.kernels_pallas.serving import refuses, skip_where_refused
from tests.kernels_pallas.strategies import bf16_rows

FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)
EXAMPLES = settings(max_examples=60, deadline=None)


@pytest.fixture(params=sorted(IMPLEMENTATIONS), scope="module")
def implementation(request):
    x, options = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16), {"axis": -1, "row_axes": (-1,)}
    skip_where_refused(IMPLEMENTATIONS, request.param, quantize, (x,), NVFP4, **options, scale_rule="amax")
    return request.param


@functools.partial(jax.jit, static_argnames=("format", "implementation"))
def run(x, format, implementation="reference"):
    packed = quantize(x, format, implementation=implementation)
    return packed.unpack(), dequantize(packed, jnp.float32)


@functools.partial(jax.jit, static_argnames=("format", "axis", "row_axes", "scale_rule", "implementation"))
def packed_and_values(x, format, **options):
    packed = quantize(x, format, **options)
    return packed, dequantize(packed), operand(packed), dequantize(packed.unpack())


def block(values, size=16, fill=0.0):
    """One row, one block: the values, then `fill`."""
    return jnp.asarray([list(values) + [fill] * (size - len(values))], jnp.bfloat16)


@FORMATS
@given(x=bf16_rows())
@EXAMPLES
def test_agrees_with_the_oracle(implementation, format, x):
    codes, values = run(jnp.asarray(x), format, implementation)
    expected = oracle.quantize_rows(x, format)
    np.testing.assert_array_equal(np.asarray(codes.row_exponent), expected["row_exponent"])
    np.testing.assert_array_equal(np.asarray(codes.scales), expected["scales"])
    np.testing.assert_array_equal(np.asarray(codes.codes), expected["codes"])
    np.testing.assert_array_equal(np.asarray(values, np.float64), expected["values"])


def test_a_row_with_scale_one_rounds_ties_to_even(implementation):
    x = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6]
    for format, size in ((NVFP4, 16), (MXFP4, 32)):
        codes, values = run(block(x, size), format, implementation)
        expected = [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, -6]
        np.testing.assert_array_equal(np.asarray(values)[0, :16], expected)
        assert 8 not in np.asarray(codes.codes)


def test_a_difference_of_two_hundredths_is_a_whole_step():
    _, values = run(block([6, 2.51, 2.49]), NVFP4)
    np.testing.assert_array_equal(np.asarray(values)[0, :3], [6, 3, 2])


@FORMATS
def test_zero_rows(implementation, format):
    codes, values = run(jnp.zeros((2, 64), jnp.bfloat16), format, implementation)
    expected_scale, expected_row = (0, 27) if format is NVFP4 else (27, 127)
    assert (np.asarray(codes.codes) == 0).all()
    assert (np.asarray(codes.scales) == expected_scale).all()
    assert (np.asarray(codes.row_exponent) == expected_row).all()
    assert (np.asarray(values) == 0).all()


def test_negative_zero_and_values_that_round_to_zero_have_code_zero(implementation):
    codes, _ = run(block([6, -0.0, -0.1, -0.25]), NVFP4, implementation)
    np.testing.assert_array_equal(np.asarray(codes.codes)[0, 1:4], 0)


@FORMATS
@pytest.mark.parametrize("tiny", [2.0**-126, 2.0**-130, 2.0**-120])
def test_tiny_rows_are_finite(implementation, format, tiny):
    x = jnp.full((1, 64), tiny, jnp.bfloat16)
    _, values = run(x, format, implementation)
    assert np.isfinite(np.asarray(values)).all()


@FORMATS
def test_the_largest_values_do_not_overflow(implementation, format):
    x = jnp.full((1, 64), jnp.finfo(jnp.bfloat16).max, jnp.bfloat16)
    _, values = run(x, format, implementation)
    assert np.isfinite(np.asarray(values)).all() and (np.asarray(values) > 2.0**127).all()


@FORMATS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_poisons_its_block_only(implementation, format, rng, bad):
    x = rng.standard_normal((2, 128)).astype(np.float32)
    x[0, 40] = bad
    codes, values = run(jnp.asarray(x), format, implementation)
    index = 40 // format.block
    held = slice(index * format.block, (index + 1) * format.block)
    assert int(codes.scales[0, index]) == format.poison
    assert (np.asarray(codes.codes)[0, held] == 0).all()
    assert np.isnan(np.asarray(values)[0, held]).all()
    # Everything else is as if the block's other values alone had been there.
    x[0, 40] = 0
    clean, clean_values = run(jnp.asarray(x), format, implementation)
    np.testing.assert_array_equal(np.asarray(codes.row_exponent), np.asarray(clean.row_exponent))
    rest = np.ones(x.shape, bool)
    rest[0, held] = False
    np.testing.assert_array_equal(np.asarray(values)[rest], np.asarray(clean_values)[rest])


def test_float32_that_rounds_to_infinity_in_bf16_is_poison(implementation):
    codes, _ = run(jnp.full((1, 16), 3.4e38, jnp.float32), NVFP4, implementation)
    assert int(codes.scales[0, 0]) == NVFP4.poison


def test_row_exponent_sees_finite_values_of_poisoned_blocks(implementation):
    x = np.ones((1, 32), np.float32)
    x[0, 0], x[0, 1] = np.nan, 2688.0 * 8
    codes, _ = run(jnp.asarray(x), NVFP4, implementation)
    assert int(codes.row_exponent[0]) == 127 + 3


def test_float32_input_is_rounded_to_bf16_first(implementation):
    # 5.01 becomes 5.0 in BF16, a tie that goes to 4; rounded once it would be 6.
    _, values = run(jnp.asarray(block([6.0, 5.01]), jnp.float32).at[0, 1].set(5.01), NVFP4, implementation)
    assert float(values[0, 1]) == 4.0


@FORMATS
def test_rounding_is_not_optimised_away_in_a_fused_program(format, rng):
    x = jnp.asarray(rng.standard_normal((16, 256)), jnp.float32)
    fused = jax.jit(lambda x: operand(quantize_codes((x * 1.3).astype(jnp.bfloat16), format)))(x)
    rounded = jax.jit(lambda x: (x * 1.3).astype(jnp.bfloat16))(x)
    split = jax.jit(lambda x: operand(quantize_codes(x, format)))(rounded)
    np.testing.assert_array_equal(np.asarray(fused), np.asarray(split))


@FORMATS
@given(x=bf16_rows(finite=True, exponents=(-20, 20)))
@EXAMPLES
def test_dequantized_values_are_exact_in_bf16_and_operands_recombine(format, x):
    _, wide = run(jnp.asarray(x), format)
    packed, narrow, bare, _ = packed_and_values(jnp.asarray(x), format)
    np.testing.assert_array_equal(np.asarray(narrow, np.float32), np.asarray(wide))
    scale = 2.0 ** (np.asarray(packed.row_exponent, np.float64) - 127)
    np.testing.assert_array_equal(np.asarray(bare, np.float64) * scale[:, None], np.asarray(wide))


@FORMATS
@given(seed=st.integers(0, 2**32 - 1), shift=st.integers(-40, 40))
@EXAMPLES
def test_a_power_of_two_moves_only_exponents(format, seed, shift):
    x = np.random.default_rng(seed).standard_normal((4, 64)).astype(ml_dtypes.bfloat16)
    codes, _ = run(jnp.asarray(x), format)
    moved, _ = run(jnp.asarray(np.ldexp(x.astype(np.float32), shift).astype(ml_dtypes.bfloat16)), format)
    np.testing.assert_array_equal(np.asarray(moved.codes), np.asarray(codes.codes))
    scale_shift, row_shift = (0, shift) if format is NVFP4 else (shift, 0)
    np.testing.assert_array_equal(np.asarray(moved.scales, int), np.asarray(codes.scales, int) + scale_shift)
    np.testing.assert_array_equal(
        np.asarray(moved.row_exponent, int), np.asarray(codes.row_exponent, int) + row_shift
    )


@FORMATS
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-60, 60))
@EXAMPLES
def test_quantizing_again_changes_no_value(format, seed, exponent):
    x = np.random.default_rng(seed).standard_normal((4, 64)) * 2.0**exponent
    _, once = run(jnp.asarray(x, jnp.float32), format)
    _, twice = run(once, format)
    np.testing.assert_array_equal(np.asarray(twice), np.asarray(once))


@FORMATS
def test_a_row_does_not_depend_on_its_companions(implementation, format, rng):
    x = rng.standard_normal((8, 128)).astype(np.float32)
    other = (rng.standard_normal((8, 128)) * 100).astype(np.float32)
    other[3] = x[3]
    codes, _ = run(jnp.asarray(x), format, implementation)
    companions, _ = run(jnp.asarray(other), format, implementation)
    for a, b in zip(jax.tree.leaves(codes), jax.tree.leaves(companions), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[3], np.asarray(b)[3])


@FORMATS
def test_weights_along_axis_minus_two_equal_their_transpose_along_minus_one(implementation, format, rng):
    w = jnp.asarray(rng.standard_normal((3, 64, 24)), jnp.float32) * jnp.float32([1, 50, 0.01])[:, None, None]
    if refuses(
        IMPLEMENTATIONS, implementation, quantize, (w,), format, axis=-2, row_axes=(-2, -1), scale_rule="amax"
    ):
        return
    options = {"row_axes": (-2, -1), "implementation": implementation}
    weight, values, _, unpacked = packed_and_values(w, format, axis=-2, **options)
    assert weight.shape == w.shape and weight.row_exponent.shape == (3,)
    rows, row_values, _, _ = packed_and_values(np.asarray(w).swapaxes(1, 2), format, **options)
    np.testing.assert_array_equal(np.asarray(weight.scales).swapaxes(1, 2), np.asarray(rows.scales))
    np.testing.assert_array_equal(np.asarray(values).swapaxes(1, 2), np.asarray(row_values))
    np.testing.assert_array_equal(np.asarray(unpacked), np.asarray(row_values))
    # Each expert has its own row scale.
    alone, alone_values, _, _ = packed_and_values(w[1], format, axis=-2, **options)
    np.testing.assert_array_equal(np.asarray(alone_values), np.asarray(values[1]))
    assert int(alone.row_exponent) == int(weight.row_exponent[1])


def test_column_rows_of_a_weight(rng):
    w = jnp.asarray(rng.standard_normal((64, 8)) * np.arange(1, 9), jnp.float32)
    columns, values, _, unpacked = packed_and_values(w, NVFP4, axis=-2, row_axes=(-2,))
    assert columns.row_exponent.shape == (8,)
    _, row_values, _, _ = packed_and_values(w.T, NVFP4)
    np.testing.assert_array_equal(np.asarray(values).T, np.asarray(row_values))
    np.testing.assert_array_equal(np.asarray(unpacked), np.asarray(row_values))


def squared_error(x, values, size=16):
    error = (np.asarray(x, np.float64) - np.asarray(values, np.float64)) ** 2
    return error.reshape(-1, size).sum(-1)


@given(x=bf16_rows(finite=True, exponents=(-20, 20)))
@EXAMPLES
def test_four_over_six_is_never_worse_than_mapping_every_maximum_to_six(x):
    # Mapping to six with scales up to 256 is the amax rule under a row scale from 6 x 256 instead of 6 x 448.
    packed, values, _, _ = packed_and_values(jnp.asarray(x), NVFP4, scale_rule="4over6")
    e = np.asarray(packed.row_exponent, np.int64)[:, None, None] - 127
    y = np.ldexp(x.astype(np.float64).reshape(x.shape[0], -1, 16), -e)
    six = (np.abs(y).max(-1).astype(np.float32) * np.float32(1 / 6)).astype(ml_dtypes.float8_e4m3fn)
    assert six.astype(np.float32).max() <= 256
    six = six.astype(np.float64)[..., None]
    quotient = np.where(six > 0, y / np.where(six > 0, six, 1), 0)
    unscaled = np.ldexp(np.asarray(values, np.float64).reshape(y.shape), -e)
    six_codes = quotient.astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    bound = squared_error(y, six_codes.astype(np.float64) * six)
    assert (squared_error(y, unscaled) <= bound * (1 + 1e-6)).all()


def test_four_over_six_maps_a_block_to_four_where_that_is_exact():
    # 4.5 is not on the grid whose largest value is 6, but 6, 4.5, 3, 1.5 is 1.5 x (4, 3, 2, 1).
    x = block([6, 4.5, 3, 1.5])
    _, values, _, _ = packed_and_values(x, NVFP4, scale_rule="4over6")
    np.testing.assert_array_equal(np.asarray(values)[0, :4], [6, 4.5, 3, 1.5])
    _, values, _, _ = packed_and_values(x, NVFP4)
    np.testing.assert_array_equal(np.asarray(values)[0, :4], [6, 4, 3, 1.5])
    # A block that both represent exactly keeps the map to six.
    both, _, _, _ = packed_and_values(block([6, 3, 1.5]), NVFP4, scale_rule="4over6")
    assert int(both.words[0, 0]) & 15 == 7


@pytest.mark.parametrize("name", SHAPES)
@FORMATS
def test_named_shapes_are_served(implementation, format, name):
    shape = SHAPES[name]
    x = jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16)
    options = {"axis": shape.axis, "row_axes": shape.row_axes, "scale_rule": "amax"}
    if refuses(IMPLEMENTATIONS, implementation, quantize, (x,), format, **options):
        return
    out = jax.eval_shape(lambda x: quantize(x, format, **options, implementation=implementation), x)
    assert out.shape == shape.shape
    values = np.prod(shape.shape)
    assert values / 2 <= out.nbytes <= values / 2 * (1 + 2 / format.block) + values / 64


def test_errors_name_what_is_wrong():
    x = jnp.zeros((2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"axis -1 has size 40.*nvfp4 block of 16.*48"):
        quantize(jnp.zeros((2, 40), jnp.bfloat16), NVFP4)
    with pytest.raises(ValueError, match=r"axis -2 has size 48.*mxfp4 block of 32.*64"):
        quantize(jnp.zeros((48, 2), jnp.bfloat16), MXFP4, axis=-2, row_axes=(-2, -1))
    for dtype in (jnp.int32, jnp.float16, jnp.uint8):
        with pytest.raises(TypeError, match=f"{jnp.dtype(dtype).name}.*bfloat16"):
            quantize(x.astype(dtype), NVFP4)
    for empty, options in ((x[:, :0], {}), (x[:0], {"row_axes": (-2, -1)})):
        with pytest.raises(ValueError, match="a row has no values, hence no scale"):
            quantize(empty, NVFP4, **options)
    for implementation in ("pallas_tpu", "triton"):
        with pytest.raises(
            ValueError, match=rf"'{implementation}' does not serve this: shape \(0, 64\) is empty"
        ):
            quantize(x[:0], NVFP4, implementation=implementation)
    assert quantize(x[:0], NVFP4).shape == (0, 64)
    with pytest.raises(ValueError, match=r"4over6.*mxfp4"):
        quantize(x, MXFP4, scale_rule="4over6")
    with pytest.raises(ValueError, match="unknown scale_rule 'mse'"):
        quantize(x, NVFP4, scale_rule="mse")
    with pytest.raises(ValueError, match=r"row_axes \(0,\)"):
        quantize(x, NVFP4, row_axes=(0,))
    with pytest.raises(ValueError, match="axis is 0; expected -1"):
        quantize(x, NVFP4, axis=0, row_axes=(0,))
    with pytest.raises(ValueError, match=r"no implementation 'cuda'; available: .*reference"):
        quantize(x, NVFP4, implementation="cuda")
    wide = jnp.zeros((1, 8192), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"'pallas_tpu' does not serve this: a row of 8192 .* 4096; use 'reference'"
    ):
        quantize(wide, NVFP4, implementation="pallas_tpu")


def test_format_is_static_and_hashable():
    assert isinstance(NVFP4, Fp4Format) and hash(NVFP4) != hash(MXFP4)
