"""Gated DeltaNet: the delta rule's two forms against its definition, and the layer against a NumPy one."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.models.config import DeltaConfig, ModelConfig
from trace_jax.models.delta import DeltaNet, DeltaState, init_delta_state
from trace_jax.models.delta_rule import delta_rule_chunked, delta_rule_recurrent, unit_lower_inverse
from trace_jax.models.layers import LayerInputs
from trace_jax.quant import Bf16Numerics

# --- the rule


def definition(q, k, v, g, beta, state):
    """S <- exp(g) (I - beta k k^T) S + beta k v^T, token by token and head by head."""
    repeats = v.shape[2] // k.shape[2]
    out, state = np.zeros_like(v), state.copy()
    for b, t, h in np.ndindex(v.shape[:3]):
        key, query = k[b, t, h // repeats], q[b, t, h // repeats]
        erase = np.eye(len(key)) - beta[b, t, h] * np.outer(key, key)
        state[b, h] = np.exp(g[b, t, h]) * erase @ state[b, h] + beta[b, t, h] * np.outer(key, v[b, t, h])
        out[b, t, h] = state[b, h].T @ query
    return out, state


def rule_inputs(rng, batch=1, tokens=40, heads=1, repeats=2, dk=4, dv=3, decay=1.0):
    """FP64 arguments of the rule; log decays between 0 and about `decay`."""
    unit = rng.standard_normal((2, batch, tokens, heads, dk))
    q, k = unit / np.linalg.norm(unit, axis=-1, keepdims=True)
    v = rng.standard_normal((batch, tokens, heads * repeats, dv))
    g = -decay * rng.uniform(size=v.shape[:3])
    state = rng.standard_normal((batch, heads * repeats, dk, dv))
    return q, k, v, g, rng.uniform(size=g.shape), state


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(rule, arguments, cotangents):
    out, pull = jax.vjp(rule, *arguments)
    return out, pull(cotangents)


def run(rule, arguments, dtype=np.float64):
    """((outputs, state), gradients of a random combination of both), computed in `dtype`."""
    rng = np.random.default_rng(7)
    with jax.enable_x64(True):
        arguments = [jnp.asarray(a, dtype) for a in arguments]
        cotangents = tuple(jnp.asarray(rng.standard_normal(arguments[i].shape), dtype) for i in (2, 5))
        return jax.device_get(value_and_gradients(rule, arguments, cotangents))


def check_close(found, expected, tolerance):
    """Largest difference of every array, relative to its largest value."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.all(np.isfinite(a))
        assert np.max(np.abs(a - b)) <= tolerance * max(1, np.max(np.abs(b)))


CHUNKS_OF_4 = functools.partial(delta_rule_chunked, chunk=4)


def test_recurrent_form_is_the_definition(rng):
    arguments = rule_inputs(rng, batch=2, tokens=5)
    check_close(run(delta_rule_recurrent, arguments)[0], definition(*arguments), 1e-13)
    one_token = [*(a[:, :1] for a in arguments[:5]), arguments[5]]
    check_close(run(delta_rule_recurrent, one_token)[0], definition(*one_token), 1e-13)


@settings(max_examples=3)
@given(data=st.data())
def test_chunks_give_the_values_and_gradients_of_single_tokens(data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    rng = np.random.default_rng(draw(0, 2**32 - 1))
    shape = {"batch": draw(1, 2), "tokens": draw(1, 11), "heads": draw(1, 2), "repeats": draw(1, 3)}
    decay = data.draw(st.sampled_from([0.0, 0.05, 1.0, 30.0]))
    arguments = rule_inputs(rng, **shape, dk=draw(1, 5), dv=draw(1, 5), decay=decay)
    check_close(run(CHUNKS_OF_4, arguments), run(delta_rule_recurrent, arguments), 1e-12)


@pytest.mark.parametrize("strong", [-0.1, -50.0, -1e4, -np.inf])
def test_default_chunks_in_fp32_lose_nothing_after_a_strong_decay(rng, strong):
    """Sums of log decays of which FP32 resolves only the strong ones; the small ones after them still count."""
    q, k, v, g, beta, state = rule_inputs(rng, tokens=150, decay=0.5)
    g[:, ::5] = strong
    arguments = (q, k, v, g, beta, state)
    exact = run(delta_rule_recurrent, arguments)
    check_close(run(delta_rule_chunked, arguments, np.float32), exact, 5e-6)


def test_one_key_overwritten_without_decay_in_fp32(rng):
    """A repeated token: the powers of the chunk's triangular matrix reach 1e17 before they cancel."""
    q, k, v, g, beta, state = rule_inputs(rng, tokens=150)
    arguments = (q, np.broadcast_to(k[:, :1], k.shape), v, 0 * g, np.full_like(beta, 0.999), state)
    check_close(run(delta_rule_chunked, arguments, np.float32), run(delta_rule_recurrent, arguments), 2e-5)


@pytest.mark.parametrize("size", [5, 16])
def test_triangular_inverse(rng, size):
    a = np.tril(rng.standard_normal((size, size)), -1)
    cotangent = rng.standard_normal(a.shape)
    inverse = np.linalg.inv(np.eye(size) + a)
    with jax.enable_x64(True):
        found, pull = jax.vjp(unit_lower_inverse, jnp.asarray(a))
        (gradient,) = pull(jnp.asarray(cotangent))
    np.testing.assert_allclose(found, inverse, rtol=1e-10, atol=1e-10 * np.abs(inverse).max())
    # d<C, (I + a)^-1> = -<inverse^T C inverse^T, da>, of which a's own entries are free.
    expected = np.tril(-inverse.T @ cotangent @ inverse.T, -1)
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-9 * max(1, np.abs(expected).max()))


# --- the layer

DELTA = DeltaConfig(key_heads=2, value_heads=4, key_dim=4, value_dim=6, conv_width=4)
LAYERS, LAYER, BATCH, LENGTH = 3, 1, 3, 12
LENGTHS = np.array([12, 7, 2])
VALID = np.arange(LENGTH) < LENGTHS[:, None]


CONFIG = ModelConfig(hidden_size=16, layer_types=("delta",), delta=DELTA, centred_norms=True)


@functools.cache
def parameters():
    """(graphdef, state) of the stacked layers; no parameter is at its initial value or exact in BF16."""
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: DeltaNet(CONFIG, LAYERS, nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return graphdef, jax.tree.map(lambda s: (0.5 * rng.standard_normal(s.shape)).astype(np.float32), shapes)


@functools.partial(jax.jit, static_argnames="config")
def call(state, x, valid, cache, layer, config):
    module = nnx.merge(parameters()[0], state)
    inputs = LayerInputs(cache=cache, layer=layer)
    with jax.default_matmul_precision("highest"):
        return module(x, jnp.zeros(valid.shape, jnp.int32), valid, inputs, Bf16Numerics(), config)[:2]


def mix(x, valid=VALID, cache=None, dtype="float32", stacked=True):
    """One layer's (outputs, state after): the state's stack where `stacked`, else of this layer alone."""
    weights = jax.tree.map(lambda leaf: leaf[LAYER], parameters()[1])
    layer = jnp.int32(LAYER) if cache is not None and stacked else None
    x, config = jnp.asarray(x, dtype), dataclasses.replace(CONFIG, dtype=dtype)
    return jax.device_get(call(weights, x, jnp.asarray(valid), cache, layer, config))


def random_state(rng, dtype="float32"):
    empty = init_delta_state(DELTA, LAYERS, BATCH, dtype)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), empty)


def expected_row(x, recurrent, history):
    """NumPy in FP64: one sequence `[T, D]` from its states `[Hv, dk, dv]` and `[W - 1, channels]`."""
    values = nnx.to_pure_dict(parameters()[1])
    p = {name: leaf[LAYER].astype(np.float64) for name, leaf in values.items()}
    c = DELTA

    def silu(y):
        return y / (1 + np.exp(-y))

    def rms(y):
        return y / np.sqrt(np.mean(y * y, axis=-1, keepdims=True) + CONFIG.norm_eps)

    def unit(y):
        return y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True) + 1e-6)

    h = rms(x) * (1 + p["norm"])
    fed = np.concatenate([history, h @ p["qkv"]])
    mixed = np.array([silu((fed[t : t + c.conv_width] * p["conv"]).sum(axis=0)) for t in range(len(x))])
    q, k, v = np.split(mixed, [c.key_heads * c.key_dim, 2 * c.key_heads * c.key_dim], axis=-1)
    q = unit(q.reshape(1, -1, c.key_heads, c.key_dim)) / np.sqrt(c.key_dim)
    k = unit(k.reshape(1, -1, c.key_heads, c.key_dim))
    v = v.reshape(1, -1, c.value_heads, c.value_dim)
    g = -np.exp(p["log_rate"]) * np.log1p(np.exp(h @ p["decay"] + p["step_bias"]))
    beta = 1 / (1 + np.exp(-h @ p["beta"]))
    out, recurrent = definition(q, k, v, g[None], beta[None], recurrent[None])
    out = rms(out[0]) * p["output_norm"] * silu((h @ p["gate"]).reshape(out.shape[1:]))
    return x + out.reshape(len(x), -1) @ p["output"], recurrent[0], fed[len(x) :]


@pytest.mark.parametrize(("tokens", "stacked"), [(1, False), (LENGTH, True)])
def test_layer_from_a_state_is_the_numpy_layer(rng, tokens, stacked):
    x = rng.standard_normal((BATCH, tokens, CONFIG.hidden_size))
    with jax.enable_x64(True):
        before = random_state(rng, "float64")
        own = jax.tree.map(lambda leaf: leaf[LAYER], before)
        y, after = mix(x, VALID[:, :tokens], before if stacked else own, "float64", stacked)
    own = jax.device_get(own)
    if stacked:
        after = jax.tree.map(lambda leaf: leaf[LAYER], after)
    for b, length in enumerate(np.minimum(LENGTHS, tokens)):
        expected = expected_row(x[b, :length], own.recurrent[b], own.conv[b])
        check_close((y[b, :length], after.recurrent[b], after.conv[b]), expected, 1e-12)


def test_full_forward_starts_from_zeros(rng):
    x = rng.standard_normal((BATCH, LENGTH, CONFIG.hidden_size))
    y, after = mix(x)
    assert after is None
    for b, length in enumerate(LENGTHS):
        expected, *_ = expected_row(x[b, :length], np.zeros((4, 4, 6)), np.zeros((3, 40)))
        check_close(y[b, :length], expected, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_prefill_then_decode_is_the_full_forward(rng, dtype, tolerance):
    """Prefill in two parts, then token by token, with rows that end early, in one layer of a stack."""
    x = rng.standard_normal((BATCH, LENGTH, CONFIG.hidden_size))
    full, _ = mix(x, dtype=dtype)
    state, parts = init_delta_state(DELTA, LAYERS, BATCH, dtype), []
    cuts = [0, 4, 8, 9, 10, 11, 12]
    for start, stop in itertools.pairwise(cuts):
        y, state = mix(x[:, start:stop], VALID[:, start:stop], state, dtype)
        parts.append(y)
    pieces = np.concatenate(parts, axis=1)
    assert pieces.dtype == full.dtype == jnp.dtype(dtype)
    assert state.recurrent.dtype == np.float32 and state.conv.dtype == jnp.dtype(dtype)
    check_close(pieces[VALID].astype(np.float32), full[VALID].astype(np.float32), tolerance)
    for leaf in jax.tree.leaves(state):
        assert not np.any(leaf[0]) and not np.any(leaf[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_changes_no_bit(rng, dtype):
    x, before = rng.standard_normal((BATCH, LENGTH, CONFIG.hidden_size)), random_state(rng, dtype)
    before = DeltaState(recurrent=before.recurrent.at[:, :, :, 0].set(-0.0), conv=before.conv)
    other = np.where(VALID[..., None], x, 100 * rng.standard_normal(x.shape))
    (y, after), (other_y, other_after) = (
        mix(x, cache=before, dtype=dtype),
        mix(other, cache=before, dtype=dtype),
    )
    assert np.array_equal(y[VALID], other_y[VALID])
    jax.tree.map(np.testing.assert_array_equal, after, other_after)
    # Rows without any valid token, -0 included.
    for tokens in (1, LENGTH):
        _, same = mix(x[:, :tokens], np.zeros((BATCH, tokens), bool), before, dtype)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(_bytes(a), _bytes(b)), same, before)


def _bytes(array):
    return np.frombuffer(np.asarray(array).tobytes(), np.uint8)


def test_gradients_are_causal_and_finite(rng):
    """Of row 1's token 4: none at later tokens, at padding or in other rows, some at every earlier one."""
    weights = jax.tree.map(lambda leaf: jnp.asarray(leaf[LAYER]), parameters()[1])
    x = jnp.asarray(rng.standard_normal((BATCH, LENGTH, CONFIG.hidden_size)), jnp.float32)

    def loss(weights, x):
        return jnp.sum(call(weights, x, jnp.asarray(VALID), None, None, CONFIG)[0][1, 4] ** 2)

    of_weights, of_x = jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(weights, x))
    for leaf in jax.tree.leaves(of_weights):
        assert np.all(np.isfinite(leaf)) and np.any(leaf)
    reached = np.zeros((BATCH, LENGTH), bool)
    reached[1, :5] = True
    assert np.array_equal(np.any(of_x != 0, axis=-1), reached)


def test_initial_decay_rates_are_those_of_the_architecture():
    state = jax.jit(lambda: nnx.split(DeltaNet(CONFIG, LAYERS, nnx.Rngs(params=0)))[1])()
    parameters = {name: np.asarray(leaf) for name, leaf in nnx.to_pure_dict(state).items()}
    rate = np.exp(parameters["log_rate"])
    assert rate.shape == (LAYERS, DELTA.value_heads) and np.all((rate >= 0.01) & (rate <= 16))
    assert len(np.unique(rate)) == rate.size
    assert np.all(parameters["step_bias"] == 1) and np.all(parameters["output_norm"] == 1)
