"""What a grouped matmul adds to and makes of its accumulators: biases and activations, and their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kernels_pallas.activations import ClampedSwiglu
from kernels_pallas.arrays import Stacked
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.grouped_matmul.api import IMPLEMENTATIONS
from kernels_pallas.quantize import dequantize, quantize
from tests.kernels_pallas.serving import served

CLAMPED = ClampedSwiglu(alpha=1.702, limit=7.0)
ROWS, EXPERTS, K = 48, 6, 64
NARROW, TILED = 48, 512  # columns: of no whole tile of a TPU, and halves of 256
SIZES = {
    "empty_middle": [13, 9, 0, 0, 25, 1],
    "rows_to_spare": [3, 0, 9, 1, 20, 2],
    "all_empty": [0, 0, 0, 0, 0, 0],
}
EACH_SIZE = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
EACH_ACTIVATION = pytest.mark.parametrize(
    "activation", [None, "swiglu", CLAMPED], ids=["none", "swiglu", "clamped"]
)
EACH_FORMAT = pytest.mark.parametrize("format", [None, NVFP4, MXFP4], ids=["bf16", "nvfp4", "mxfp4"])


@pytest.fixture(params=sorted(IMPLEMENTATIONS), scope="module")
def implementation(request):
    return request.param


@pytest.fixture(scope="module")
def run(implementation):
    run = functools.partial(grouped_matmul, implementation=implementation)
    return served(implementation, jax.jit(run, static_argnames="activation"))


@pytest.fixture(scope="module")
def gradients(implementation):
    def loss(x, w, bias, sizes, activation):
        out = grouped_matmul(x, w, sizes, bias=bias, activation=activation, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    return served(implementation, jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=4))


def inputs(rng, columns=NARROW, dtype=jnp.bfloat16):
    """Rows, weights and biases of which a clamp sees both sides."""
    x = jnp.asarray(rng.standard_normal((ROWS, K)), dtype)
    w = jnp.asarray(rng.standard_normal((EXPERTS, K, columns)), dtype)
    return x, w, jnp.asarray(4 * rng.standard_normal((EXPERTS, columns)), dtype)


@functools.partial(jax.jit, static_argnums=2)
def packed(x, w, format):
    """Operands in FP4, and the values that they stand for."""
    if format is None:
        return x, w, x.astype(jnp.float32), w.astype(jnp.float32)
    x, w = quantize(x, format), quantize(w, format, axis=-2, row_axes=(-2, -1))
    return x, w, dequantize(x, jnp.float32), dequantize(w, jnp.float32)


def expected_of(x, w, sizes, bias, activation):
    """In float64, row by row."""
    x, w, bias = (np.asarray(a, np.float64) for a in (x, w, bias))
    group = np.repeat(np.arange(len(sizes)), sizes)
    out = np.einsum("rk,rkn->rn", x[: len(group)], w[group]) + bias[group]
    if activation is not None:
        gate, up = np.split(out, 2, axis=1)
        if activation == "swiglu":
            out = gate / (1 + np.exp(-gate)) * up
        else:
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            out = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return np.concatenate([out, np.zeros((len(x) - len(group), out.shape[1]))])


@EACH_SIZE
@EACH_ACTIVATION
def test_a_groups_bias_is_added_before_the_activation(run, rng, sizes, activation):
    x, w, bias = inputs(rng)
    out = np.asarray(run(x, w, jnp.int32(sizes), bias=bias, activation=activation))
    expected = expected_of(x, w, sizes, bias, activation)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6 * np.abs(expected).max())
    assert (out[sum(sizes) :] == 0).all()


@EACH_FORMAT
@EACH_ACTIVATION
@pytest.mark.parametrize("columns", [NARROW, TILED])
def test_biases_come_after_row_scales(run, rng, format, activation, columns):
    x, w, bias = inputs(rng, columns)
    x, w = x * 2.0**-9, w * jnp.asarray(2.0 ** (8 + np.arange(EXPERTS) % 3), w.dtype)[:, None, None]
    sizes = SIZES["rows_to_spare"]
    x, w, x_values, w_values = packed(x, w, format)
    out = run(x, w, jnp.int32(sizes), bias=bias.astype(jnp.float32) / 3, activation=activation)
    expected = expected_of(x_values, w_values, sizes, bias.astype(jnp.float32) / 3, activation)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=2e-5, atol=2e-6 * np.abs(expected).max())


def test_fewer_rows_than_experts(run, rng):
    """Where the reference decodes only the matrices that are used."""
    x, w, bias = inputs(rng)
    x, w, x_values, w_values = packed(x[:3], w, NVFP4)
    sizes = [0, 1, 0, 0, 1, 0]
    out = np.asarray(run(x, w, jnp.int32(sizes), bias=bias, activation=CLAMPED))
    expected = expected_of(x_values, w_values, sizes, bias, CLAMPED)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6 * np.abs(expected).max())


@EACH_FORMAT
def test_a_layer_of_a_stack_is_that_layer_alone(run, rng, format):
    x, w, bias = inputs(rng, TILED)
    sizes = jnp.int32(SIZES["rows_to_spare"])
    x, w, *_ = packed(x, w, format)
    # Other layers hold what would show: all bits set are NaN as BF16 and as scale bytes.
    ones = jax.tree.map(lambda leaf: jnp.full(leaf.shape, -1, f"i{leaf.dtype.itemsize}").view(leaf.dtype), w)
    stack = jax.tree.map(lambda bad, leaf: jnp.stack([bad, bad, leaf, bad]), ones, w)
    for activation in (None, CLAMPED):
        options = {"bias": bias, "activation": activation}
        out = run(x, Stacked(stack, jnp.int32(2)), sizes, **options)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(run(x, w, sizes, **options)))


@pytest.mark.parametrize("where", ["rows", "weights", "biases"])
@pytest.mark.parametrize("columns", [NARROW, TILED])
def test_nan_in_one_expert_leaves_the_others_bitwise_unchanged(run, gradients, rng, where, columns):
    x, w, bias = clean = inputs(rng, columns)
    sizes = jnp.int32([5, 9, 0, 14, 11, 6])  # expert 3 holds rows 14 to 27; the last 3 are of no group
    poisoned = {
        "rows": (x.at[14:28].set(jnp.nan), w, bias),
        "weights": (x, w.at[3].set(jnp.nan), bias),
        "biases": (x, w, bias.at[3].set(jnp.nan)),
    }[where]

    def outputs(x, w, bias):
        out = run(x, w, sizes, bias=bias, activation=CLAMPED)
        return [np.asarray(a) for a in (out, *gradients(x, w, bias, sizes, CLAMPED))]

    others, rest = np.ones(ROWS, bool), np.arange(EXPERTS) != 3
    others[14:28] = False
    kept = (others, others, rest, rest)  # of the result, and of the gradients of x, w and bias
    found = outputs(*poisoned)
    for good, bad, keep in zip(outputs(*clean), found, kept, strict=True):
        np.testing.assert_array_equal(bad[keep], good[keep])
    assert np.isnan(found[0][14:28]).all() and (found[0][45:] == 0).all()


def test_gradients_are_right_in_float64(run, rng):
    with jax.enable_x64(True):
        x, w = jnp.asarray(rng.standard_normal((10, 4))), jnp.asarray(rng.standard_normal((3, 4, 6)))
        sizes, bias = jnp.int32([4, 0, 5]), jnp.asarray(rng.standard_normal((3, 6)))
        for activation in (None, "swiglu", ClampedSwiglu(alpha=1.5, limit=1.0)):
            check_grads(
                lambda x, w, bias, activation=activation: run(x, w, sizes, bias=bias, activation=activation),
                (x, w, bias),
                order=1,
                modes=["rev"],
            )


@EACH_SIZE
def test_a_bias_has_the_summed_gradient_of_its_groups_rows(gradients, run, rng, sizes):
    x, w, bias = inputs(rng)
    found = gradients(x, w, bias, jnp.int32(sizes), None)
    assert [g.dtype for g in found] == [jnp.bfloat16] * 3
    cotangent = np.cos(expected_of(x, w, sizes, bias, None)[: sum(sizes)])
    expected = np.zeros((EXPERTS, NARROW))
    np.add.at(expected, np.repeat(np.arange(EXPERTS), sizes), cotangent)
    np.testing.assert_allclose(np.asarray(found[2], np.float64), expected, rtol=2**-8, atol=1e-4)
    assert not np.asarray(found[2])[np.asarray(sizes) == 0].any()


def test_gradients_of_many_bf16_rows_do_not_stop_growing(implementation, rng):
    x, w = jnp.zeros((4096, 16), jnp.bfloat16), jnp.zeros((2, 16, 16), jnp.bfloat16)
    bias, sizes = jnp.zeros((2, 16), jnp.bfloat16), jnp.int32([4000, 0])
    run = functools.partial(grouped_matmul, x, w, sizes, implementation=implementation)
    gradient = served(implementation, jax.jit(jax.grad(lambda bias: run(bias=bias).sum())))(bias)
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), [[4000.0] * 16, [0.0] * 16])


def test_errors_name_what_is_wrong(rng):
    x, w, bias = inputs(rng)
    sizes = jnp.int32(SIZES["empty_middle"])
    for wrong in (bias[1:], bias[:, 1:], bias[0], bias[None]):
        with pytest.raises(ValueError, match=r"bias has shape .*; expected \(6, 48\), a row per expert"):
            grouped_matmul(x, w, sizes, bias=wrong)
    for dtype in (jnp.float16, jnp.int32):
        with pytest.raises(
            TypeError, match=rf"bias is {jnp.dtype(dtype)}; expected one of .'bfloat16', 'float32'"
        ):
            grouped_matmul(x, w, sizes, bias=bias.astype(dtype))
    with jax.enable_x64(True), pytest.raises(TypeError, match="bias is float64"):
        grouped_matmul(x, w, sizes, bias=bias.astype(jnp.float64))
    with pytest.raises(
        ValueError, match=r"\(6, 64, 47\); ClampedSwiglu\(.*\) needs gate and up columns, an even"
    ):
        grouped_matmul(x, w[..., 1:], sizes, activation=CLAMPED)
