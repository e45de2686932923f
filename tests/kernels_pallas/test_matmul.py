"""Matmul: values against float64, exactness of FP4 operands, gradients, row independence, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads

from kernels_pallas import dots
from kernels_pallas.arrays import Stacked
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.matmul import matmul
from kernels_pallas.matmul.api import IMPLEMENTATIONS
from kernels_pallas.matmul.shapes import SHAPES
from kernels_pallas.quantize import dequantize
from tests.kernels_pallas.jitted import quantize
from tests.kernels_pallas.serving import served

FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)
TINY = SHAPES["tiny"]


@pytest.fixture(params=sorted(IMPLEMENTATIONS), scope="module")
def run(request):
    return served(request.param, jax.jit(lambda x, w: matmul(x, w, implementation=request.param)))


@pytest.fixture
def operands(rng):
    x = rng.standard_normal((2, TINY.m, TINY.k)) * np.ldexp(1.0, rng.integers(-9, 9, (2, TINY.m, 1)))
    w = rng.standard_normal((TINY.k, TINY.n)) * 0.05
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="format")
def fp4(x, w, format):
    return quantize(x, format), quantize(w, format, axis=-2, row_axes=(-2, -1))


VALUES = jax.jit(dequantize)


def close(actual, expected, k=TINY.k):
    """FP32 accumulation of k products: an error of k rounding units of the sum of magnitudes at most."""
    actual, (value, magnitude) = np.asarray(actual, np.float64), expected
    assert (np.abs(actual - value) <= k * 2.0**-23 * magnitude + 1e-30).all()


def exact(x, w):
    x, w = (np.asarray(a, np.float64) for a in (x, w))
    return x @ w, np.abs(x) @ np.abs(w)


def test_arrays_accumulate_in_float32(run, operands):
    x, w = operands
    out = run(x, w)
    assert out.dtype == jnp.float32 and out.shape == (2, TINY.m, TINY.n)
    close(out, exact(x, w))


@FORMATS
@pytest.mark.parametrize("kind", ["x", "w", "both"])
def test_fp4_operands_are_their_dequantized_values(run, operands, format, kind):
    x, w = operands
    x_q, w_q = fp4(x, w, format)
    x, x_values = (x, x) if kind == "w" else (x_q, VALUES(x_q))
    w, w_values = (w, w) if kind == "x" else (w_q, VALUES(w_q))
    close(run(x, w), exact(x_values, w_values))


def test_row_scales_multiply_the_accumulator_exactly(run, operands):
    """Rows moved by a power of two give outputs moved by it, bit for bit, though the operands are the same."""
    x, w = operands
    x_q, w_q = fp4(x, w, NVFP4)
    moved, _ = fp4(x * 2.0**20, w, NVFP4)
    np.testing.assert_array_equal(np.asarray(moved.words), np.asarray(x_q.words))
    np.testing.assert_array_equal(np.asarray(run(moved, w_q)), np.asarray(run(x_q, w_q)) * 2.0**20)


def test_column_scales_of_a_weight(run, operands):
    x, w = operands
    w = w * jnp.asarray(2.0 ** (np.arange(TINY.n) % 7), jnp.bfloat16)[None]
    columns = jax.jit(lambda w: quantize(w, NVFP4, axis=-2, row_axes=(-2,)))(w)
    assert columns.row_exponent.shape == (TINY.n,)
    close(run(x, columns), exact(x, VALUES(columns)))


def test_a_float32_operand_beside_fp4(run, operands):
    x, w = operands
    _, w_q = fp4(x, w, NVFP4)
    with jax.default_matmul_precision("highest"):
        close(run(x.astype(jnp.float32) * 1.01, w_q), exact(x.astype(jnp.float32) * 1.01, VALUES(w_q)))


def test_poison_reaches_the_row_that_holds_it_only(run, operands):
    x, w = operands
    x_q, w_q = fp4(x.at[0, 3, 7].set(jnp.nan), w, NVFP4)
    nan = np.isnan(np.asarray(run(x_q, w_q)))
    assert nan[0, 3].all() and nan.sum() == TINY.n


def test_a_row_does_not_depend_on_its_companions(run, rng):
    x = rng.standard_normal((TINY.m, TINY.k)).astype(jnp.bfloat16)
    other = rng.standard_normal((TINY.m, TINY.k)).astype(jnp.bfloat16)
    other[5] = x[5]
    w = jnp.asarray(rng.standard_normal((TINY.k, TINY.n)), jnp.bfloat16)
    a, b = run(jnp.asarray(x), w), run(jnp.asarray(other), w)
    np.testing.assert_array_equal(np.asarray(a)[5], np.asarray(b)[5])


def test_gradients_equal_those_of_a_plain_matmul_in_float32(run, rng):
    x = jnp.asarray(rng.standard_normal((3, 8, 32)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((32, 16)), jnp.float32)

    def gradients(f):
        return jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), argnums=(0, 1)))(x, w)

    with jax.default_matmul_precision("highest"):
        for ours, plain in zip(gradients(run), gradients(jnp.matmul), strict=True):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(plain), rtol=1e-5, atol=1e-5)


def test_a_layer_of_a_stack_is_that_layer_alone(run, rng):
    x = jnp.asarray(rng.integers(-6, 7, (3, 5, 64)), jnp.bfloat16)  # sums are exact in any order
    stack = jnp.asarray(rng.integers(-6, 7, (3, 64, 48)), jnp.bfloat16)
    expected = matmul(x, stack[2], implementation="reference")
    np.testing.assert_array_equal(np.asarray(run(x, Stacked(stack, jnp.int32(2)))), np.asarray(expected))


@FORMATS
def test_gradient_past_packed_weights_is_that_of_their_values(run, operands, format):
    x, w = operands
    w = quantize(w, format, axis=-2, row_axes=(-2, -1))
    found = jax.grad(lambda x: jnp.sum(jnp.sin(run(x, w))))(x)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(matmul(x, w, implementation="reference"))))(x)
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=0.02, atol=1e-3
    )


def test_gradients_are_right_in_float64(run, rng):
    with jax.enable_x64(True):
        x, w = jnp.asarray(rng.standard_normal((4, 8))), jnp.asarray(rng.standard_normal((8, 3)))
        assert run(x, w).dtype == jnp.float64
        check_grads(run, (x, w), order=1, modes=["rev"])


def test_backward_gemms_have_bf16_operands_and_float32_accumulators(operands):
    x, w = operands
    x = x[0]
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: matmul(x, w).sum(), argnums=(0, 1)))(x, w)
    dots_found = [e for e in walk(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(dots_found) == 3
    for equation in dots_found:
        assert [v.aval.dtype for v in equation.invars] == [jnp.bfloat16] * 2
        assert equation.outvars[0].aval.dtype == jnp.float32
    dx, dw = jax.grad(lambda x, w: matmul(x, w).sum(), argnums=(0, 1))(x, w)
    assert dx.dtype == dw.dtype == jnp.bfloat16


def walk(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for sub in jaxprs_in_params(equation.params):
            yield from walk(sub)


def test_einsum_in_float64_has_the_gradient_of_any_contraction(rng):
    with jax.enable_x64(True):
        x, y = jnp.asarray(rng.standard_normal((2, 3, 4))), jnp.asarray(rng.standard_normal((2, 5, 4)))
        contraction = jax.jit(lambda x, y: dots.einsum("bmk,bnk->bmn", x, y))
        check_grads(contraction, (x, y), order=1, modes=["rev"])


@pytest.mark.parametrize("name", SHAPES)
@FORMATS
def test_named_shapes_are_served(run, format, name):
    shape = SHAPES[name]
    x = jax.ShapeDtypeStruct((shape.m, shape.k), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((shape.k, shape.n), jnp.bfloat16)
    w_q = jax.eval_shape(lambda w: quantize(w, format, axis=-2, row_axes=(-2, -1)), w)
    out = jax.eval_shape(run, x, w_q)
    assert out.shape == (shape.m, shape.n) and out.dtype == jnp.float32


def test_errors_name_what_is_wrong(operands):
    x, w = operands
    x_q, w_q = fp4(x, w, NVFP4)
    with pytest.raises(ValueError, match=r"x \(2, 24, 128\) by w \(96, 128\)"):
        matmul(x, w.T)
    with pytest.raises(TypeError, match="x is float32 and w is bfloat16"):
        matmul(x.astype(jnp.float32), w)
    with pytest.raises(TypeError, match="layer is float32; expected int32"):
        matmul(x, Stacked(w[None], jnp.float32(0)))
    with pytest.raises(TypeError, match="x is int32; expected bfloat16"):
        matmul(x.astype(jnp.int32), w)
    with pytest.raises(ValueError, match="w is FP4 along axis -1; expected axis -2"):
        matmul(x, x_q)
    with pytest.raises(ValueError, match="x is FP4 along axis -2; expected axis -1"):
        matmul(w_q, w)
    with pytest.raises(ValueError, match=r"no implementation 'cuda'; available"):
        matmul(x, w, implementation="cuda")
