"""Grouped matmul: values and gradients against lax.ragged_dot, empty experts, NaN isolation, row independence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from kernels_pallas.arrays import Stacked
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.grouped_matmul.api import IMPLEMENTATIONS
from kernels_pallas.grouped_matmul.reference import block_layout, block_rows
from kernels_pallas.grouped_matmul.shapes import SHAPES
from kernels_pallas.quantize import dequantize, quantize
from tests.kernels_pallas.serving import served

TINY = SHAPES["tiny"]  # 48 rows, 6 experts
SIZES = {
    "even": [8, 8, 8, 8, 8, 8],
    "empty_first": [0, 20, 9, 1, 11, 7],
    "empty_middle": [13, 9, 0, 0, 25, 1],
    "empty_last": [17, 20, 9, 1, 1, 0],
    "one_takes_all": [0, 0, 0, 48, 0, 0],
    "all_empty": [0, 0, 0, 0, 0, 0],
    "rows_to_spare": [3, 0, 9, 1, 20, 2],
}
EACH_SIZE = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


@pytest.fixture(params=sorted(IMPLEMENTATIONS), scope="module")
def implementation(request):
    return request.param


@pytest.fixture(scope="module")
def run(implementation):
    run = functools.partial(grouped_matmul, implementation=implementation)
    return served(implementation, jax.jit(run, static_argnames="activation"))


@pytest.fixture(scope="module")
def gradients(implementation):
    def loss(x, w, sizes):
        return jnp.sum(jnp.sin(grouped_matmul(x, w, sizes, implementation=implementation)))

    return served(implementation, jax.jit(jax.grad(loss, argnums=(0, 1))))


def inputs(rng, dtype=jnp.float32, shape=TINY):
    x = jnp.asarray(rng.standard_normal((shape.rows, shape.k)), dtype)
    return x, jnp.asarray(rng.standard_normal((shape.experts, shape.k, shape.n)), dtype)


def ragged_dot(x, w, sizes):
    return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)


@jax.jit
def ragged_gradients(x, w, sizes):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(ragged_dot(x, w, sizes))), argnums=(0, 1))(x, w)


@EACH_SIZE
def test_agrees_with_ragged_dot(run, rng, sizes):
    x, w = inputs(rng)
    sizes = jnp.int32(sizes)
    out = np.asarray(run(x, w, sizes))
    np.testing.assert_allclose(out, np.asarray(ragged_dot(x, w, sizes)), rtol=1e-5, atol=1e-4)
    assert (out[int(sizes.sum()) :] == 0).all()


@EACH_SIZE
def test_gradients_agree_with_ragged_dots(gradients, rng, sizes):
    x, w = inputs(rng)
    sizes = jnp.int32(sizes)
    dx, dw = gradients(x, w, sizes)
    expected_dx, expected_dw = ragged_gradients(x, w, sizes)
    np.testing.assert_allclose(np.asarray(dx), np.asarray(expected_dx), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(dw), np.asarray(expected_dw), rtol=1e-4, atol=1e-4)
    assert (np.asarray(dw)[np.asarray(sizes) == 0] == 0).all()


def test_bf16_operands_accumulate_in_float32(run, gradients, rng):
    x, w = inputs(rng, jnp.bfloat16)
    sizes = jnp.int32(SIZES["empty_middle"])
    out = run(x, w, sizes)
    assert out.dtype == jnp.float32
    wide = ragged_dot(x.astype(jnp.float32), w.astype(jnp.float32), sizes)
    np.testing.assert_allclose(np.asarray(out), np.asarray(wide), rtol=1e-5, atol=1e-4)
    assert [g.dtype for g in gradients(x, w, sizes)] == [jnp.bfloat16] * 2


def test_gradients_are_right_in_float64(run, rng):
    with jax.enable_x64(True):
        x, w = jnp.asarray(rng.standard_normal((10, 4))), jnp.asarray(rng.standard_normal((3, 4, 2)))
        sizes = jnp.int32([4, 0, 5])
        check_grads(lambda x, w: run(x, w, sizes), (x, w), order=1, modes=["rev"])


@pytest.mark.parametrize(
    ("format", "name", "kind"),
    [
        *((NVFP4, name, kind) for name in ("tiny", "tiny_decode") for kind in ("x", "w", "both")),
        (MXFP4, "tiny", "both"),
        (MXFP4, "tiny_decode", "w"),
    ],
    ids=lambda p: getattr(p, "name", p),
)
def test_fp4_operands_are_their_dequantized_values(run, rng, format, name, kind):
    shape = SHAPES[name]
    x, w = inputs(rng, jnp.bfloat16, shape)
    sizes = np.zeros(shape.experts, np.int32)
    np.add.at(sizes, rng.integers(0, shape.experts, shape.rows), 1)
    w = w * jnp.asarray(2.0 ** np.arange(shape.experts), jnp.bfloat16)[:, None, None]

    @jax.jit
    def quantized(x, w):
        x_q, w_q = quantize(x, format), quantize(w, format, axis=-2, row_axes=(-2, -1))
        return x_q, w_q, dequantize(x_q, jnp.float32), dequantize(w_q, jnp.float32)

    x_q, w_q, x_values, w_values = quantized(x, w)
    x, x_values = (x, x.astype(jnp.float32)) if kind == "w" else (x_q, x_values)
    w, w_values = (w, w.astype(jnp.float32)) if kind == "x" else (w_q, w_values)
    expected = np.asarray(ragged_dot(x_values, w_values, jnp.asarray(sizes)))
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(run(x, w, jnp.asarray(sizes))), expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("where", ["rows", "weights"])
def test_nan_in_one_expert_leaves_the_others_bitwise_unchanged(run, gradients, rng, where):
    x, w = inputs(rng, jnp.bfloat16)
    sizes = jnp.int32([5, 9, 0, 14, 11, 6])  # expert 3 holds rows 14 to 27
    bad_x = x.at[14:28].set(jnp.nan) if where == "rows" else x
    bad_w = w.at[3].set(jnp.nan) if where == "weights" else w
    others = np.ones(TINY.rows, bool)
    others[14:28] = False
    clean, poisoned = np.asarray(run(x, w, sizes)), np.asarray(run(bad_x, bad_w, sizes))
    np.testing.assert_array_equal(poisoned[others], clean[others])
    assert np.isnan(poisoned[14:28]).all()
    (dx, dw), (bad_dx, bad_dw) = gradients(x, w, sizes), gradients(bad_x, bad_w, sizes)
    np.testing.assert_array_equal(np.asarray(bad_dx)[others], np.asarray(dx)[others])
    rest = np.arange(TINY.experts) != 3
    np.testing.assert_array_equal(np.asarray(bad_dw)[rest], np.asarray(dw)[rest])


def test_a_poisoned_fp4_expert_leaves_the_others_bitwise_unchanged(run, rng):
    x, w = inputs(rng, jnp.bfloat16)
    sizes = jnp.int32([5, 9, 0, 14, 11, 6])
    pack = jax.jit(lambda x, w: (quantize(x, NVFP4), quantize(w, NVFP4, axis=-2, row_axes=(-2, -1))))
    clean, poisoned = run(*pack(x, w), sizes), run(*pack(x, w.at[3, 0, 0].set(jnp.inf)), sizes)
    clean, poisoned = np.asarray(clean), np.asarray(poisoned)
    np.testing.assert_array_equal(np.delete(poisoned, slice(14, 28), 0), np.delete(clean, slice(14, 28), 0))
    assert np.isnan(poisoned[14:28, 0]).all() and not np.isnan(poisoned[14:28, 1:]).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_row_does_not_depend_on_its_companions(run, rng, dtype):
    x, w = inputs(rng, dtype)
    sizes = jnp.int32(SIZES["empty_middle"])
    other = jnp.asarray(rng.standard_normal(x.shape), dtype).at[15].set(x[15])
    a, b = np.asarray(run(x, w, sizes)), np.asarray(run(other, w, sizes))
    np.testing.assert_array_equal(a[15], b[15])


LAYOUT = jax.jit(lambda sizes, rows: block_layout(sizes, rows).__dict__, static_argnums=1)


@given(rows=st.sampled_from([1, 7, 40, 100]), cuts=st.lists(st.integers(0, 100), min_size=6, max_size=6))
@settings(max_examples=60, deadline=None)
def test_every_row_has_one_slot_in_a_block_of_its_own_expert(rows, cuts):
    ends = np.minimum(np.sort(cuts), rows)
    sizes = np.diff(ends, prepend=0).astype(np.int32)
    total, size = int(sizes.sum()), block_rows(rows, len(sizes))
    layout = {name: np.asarray(value) for name, value in LAYOUT(jnp.asarray(sizes), rows).items()}
    np.testing.assert_array_equal(layout["in_group"], np.arange(rows) < total)
    used = layout["slot"][:total]
    assert len(set(used)) == total and (used < layout["row"].size).all()
    assert layout["filled"].sum() == total and layout["filled"].reshape(-1)[used].all()
    np.testing.assert_array_equal(layout["row"].reshape(-1)[used], np.arange(total))
    np.testing.assert_array_equal(layout["group"][used // size], np.repeat(np.arange(len(sizes)), sizes))


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_are_served(run, name):
    shape = SHAPES[name]
    x = jax.ShapeDtypeStruct((shape.rows, shape.k), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((shape.experts, shape.k, shape.n), jnp.bfloat16)
    w_q = jax.eval_shape(lambda w: quantize(w, NVFP4, axis=-2, row_axes=(-2, -1)), w)
    sizes = jax.ShapeDtypeStruct((shape.experts,), jnp.int32)
    bias = jax.ShapeDtypeStruct((shape.experts, shape.n), jnp.bfloat16) if shape.biased else None
    served = functools.partial(run, activation=shape.activation)
    out = jax.eval_shape(lambda x, w, sizes, bias: served(x, w, sizes, bias=bias), x, w_q, sizes, bias)
    assert out.shape == (shape.rows, shape.n // 2 if shape.activation else shape.n)


def test_errors_name_what_is_wrong(rng):
    x, w = inputs(rng)
    sizes = jnp.int32(SIZES["even"])
    with pytest.raises(ValueError, match=r"group_sizes has shape \(5,\); expected \(6,\)"):
        grouped_matmul(x, w, sizes[:5])
    with pytest.raises(TypeError, match="group_sizes is float32; expected int32"):
        grouped_matmul(x, w, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"w has shape \(0, 64, 48\): no experts"):
        grouped_matmul(x, w[:0], sizes[:0])
    with pytest.raises(ValueError, match=r"x \(48, 64\) by w \(6, 48, 64\)"):
        grouped_matmul(x, w.swapaxes(1, 2), sizes)
    with pytest.raises(TypeError, match="w is float16; expected"):
        grouped_matmul(x, w.astype(jnp.float16), sizes)
    with pytest.raises(ValueError, match=r"no implementation 'cuda'; available"):
        grouped_matmul(x, w, sizes, implementation="cuda")
    with pytest.raises(ValueError, match=r"unknown activation 'relu'; expected None or one of \('swiglu',\)"):
        grouped_matmul(x, w, sizes, activation="relu")
    with pytest.raises(
        ValueError, match=r"unknown activation 'clamped_swiglu'; expected .* or a ClampedSwiglu"
    ):
        grouped_matmul(x, w, sizes, activation="clamped_swiglu")
    with pytest.raises(ValueError, match=r"\(6, 64, 47\); swiglu needs gate and up columns, an even number"):
        grouped_matmul(x, w[..., 1:], sizes, activation="swiglu")
    with pytest.raises(TypeError, match="layer is float32; expected int32"):
        grouped_matmul(x, Stacked(w[None], jnp.float32(0)), sizes)


FP4_OR_NOT = pytest.mark.parametrize("packed", [False, True], ids=["bf16", "nvfp4"])


def swiglu_inputs(rng, packed, shape):
    """Operands of which silu sees the whole range, and sizes with an empty group."""
    x, w = inputs(rng, jnp.bfloat16, shape)
    sizes = np.bincount(rng.integers(1, shape.experts, shape.rows), minlength=shape.experts)
    if packed:
        x, w = jax.jit(lambda x, w: (quantize(x, NVFP4), quantize(w, NVFP4, axis=-2, row_axes=(-2, -1))))(
            x, w
        )
    return x, w, jnp.asarray(sizes, jnp.int32)


@FP4_OR_NOT
@pytest.mark.parametrize("name", ["tiny", "tiny_decode"])
def test_swiglu_is_silu_of_the_gate_columns_times_the_up_columns(run, rng, packed, name):
    x, w, sizes = swiglu_inputs(rng, packed, SHAPES[name])
    gate, up = np.split(np.asarray(run(x, w, sizes), np.float64), 2, axis=1)
    out = run(x, w, sizes, activation="swiglu")
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out), gate / (1 + np.exp(-gate)) * up, rtol=2e-5, atol=1e-5)


def test_gradients_of_swiglu_are_right_in_float64(run, rng):
    with jax.enable_x64(True):
        x, w = jnp.asarray(rng.standard_normal((10, 4))), jnp.asarray(rng.standard_normal((3, 4, 6)))
        sizes = jnp.int32([4, 0, 5])
        check_grads(lambda x, w: run(x, w, sizes, activation="swiglu"), (x, w), order=1, modes=["rev"])


@FP4_OR_NOT
@pytest.mark.parametrize("name", ["tiny", "tiny_decode"])
def test_a_layer_of_a_stack_is_that_layer_alone(run, rng, packed, name):
    x, w, sizes = swiglu_inputs(rng, packed, SHAPES[name])
    # Other layers hold what would show: all bits set are NaN as BF16 and as scale bytes.
    ones = jax.tree.map(lambda leaf: jnp.full(leaf.shape, -1, f"i{leaf.dtype.itemsize}").view(leaf.dtype), w)
    stack = jax.tree.map(lambda bad, leaf: jnp.stack([bad, bad, leaf, bad]), ones, w)
    for activation in (None, "swiglu"):
        out = run(x, Stacked(stack, jnp.int32(2)), sizes, activation=activation)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(run(x, w, sizes, activation=activation)))
