"""Dispatch to experts against a dense product, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.formats import NVFP4
from kernels_pallas.quantize import dequantize, quantize
from trace_jax.models.dispatch import expert_matmul, make_dispatch

TOKENS, K, N, EXPERTS, PER_TOKEN = 13, 32, 24, 5, 3


@pytest.fixture
def case(rng):
    experts = np.stack(
        [rng.permutation(EXPERTS - 1)[:PER_TOKEN] for _ in range(TOKENS)]
    )  # the last one is empty
    return (
        jnp.asarray(experts, jnp.int32),
        jnp.asarray(rng.standard_normal((TOKENS, PER_TOKEN, K)), jnp.float32),
        jnp.asarray(rng.standard_normal((EXPERTS, K, N)), jnp.float32),
        jnp.asarray(rng.standard_normal((TOKENS, PER_TOKEN, N)), jnp.float32),
    )


def dense(x, w, experts):
    if x.ndim == 2:
        x = jnp.broadcast_to(x[:, None], (x.shape[0], PER_TOKEN, x.shape[1]))
    return jnp.einsum("tik,tikn->tin", x, w[experts], precision="highest")


def test_dispatch_sorts_by_expert_and_back(case):
    experts = case[0]
    dispatch = make_dispatch(experts, EXPERTS)
    flat = np.asarray(experts).reshape(-1)
    assert (np.diff(flat[dispatch.order]) >= 0).all()
    assert np.array_equal(np.asarray(dispatch.order)[dispatch.inverse], np.arange(flat.size))
    assert np.array_equal(dispatch.group_sizes, np.bincount(flat, minlength=EXPERTS))
    assert dispatch.group_sizes.dtype == jnp.int32


@pytest.mark.parametrize("shared", [True, False])
def test_each_row_meets_its_own_expert(case, shared):
    experts, x, w, cotangent = case
    x = x[:, 0] if shared else x

    @jax.jit
    def run(x, w):
        out, pullback = jax.vjp(
            lambda x, w: expert_matmul(x, w, make_dispatch(experts, EXPERTS), PER_TOKEN), x, w
        )
        return out, pullback(cotangent)

    expected, pullback = jax.vjp(lambda x, w: dense(x, w, experts), x, w)
    out, (dx, dw) = run(x, w)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, pullback(cotangent)[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, pullback(cotangent)[1], rtol=1e-5, atol=1e-5)
    assert not np.any(np.asarray(dw)[EXPERTS - 1])  # no token chose it


def test_each_row_gets_its_own_experts_bias(case, rng):
    experts, x, w, cotangent = case
    bias = jnp.asarray(rng.standard_normal((EXPERTS, N)), jnp.float32)

    @jax.jit
    def run(bias):
        dispatch = make_dispatch(experts, EXPERTS)
        out, pullback = jax.vjp(lambda bias: expert_matmul(x, w, dispatch, PER_TOKEN, bias=bias), bias)
        return out, *pullback(cotangent)

    out, gradient = run(bias)
    np.testing.assert_allclose(out, dense(x, w, experts) + bias[experts], rtol=1e-5, atol=1e-5)
    expected = np.zeros((EXPERTS, N))
    np.add.at(expected, np.asarray(experts), np.asarray(cotangent, np.float64))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    assert not np.any(np.asarray(gradient)[EXPERTS - 1])  # no token chose it


def test_fp4_rows_and_weights(case):
    experts, x, w, _ = case

    @jax.jit
    def run(x, w):
        x_q, w_q = quantize(x, NVFP4), quantize(w, NVFP4, axis=-2, row_axes=(-2, -1))
        out = expert_matmul(x_q, w_q, make_dispatch(experts, EXPERTS), PER_TOKEN)
        return out, dense(dequantize(x_q, jnp.float32), dequantize(w_q, jnp.float32), experts)

    out, expected = run(x, w)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_result_does_not_depend_on_the_order_of_tokens(case, rng):
    experts, x, w, _ = case
    order = rng.permutation(TOKENS)
    out = expert_matmul(x, w, make_dispatch(experts, EXPERTS), PER_TOKEN)
    permuted = expert_matmul(x[order], w, make_dispatch(experts[order], EXPERTS), PER_TOKEN)
    assert np.array_equal(permuted, np.asarray(out)[order])
