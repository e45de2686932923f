"""Latent attention: prefill, decode and the trainer's forward from identical inputs; what is rounded and written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import unpack_codes
from kernels_pallas.kv_cache import init_latent_cache
from kernels_pallas.quantize import dequantize, quantize
from tests.trace_jax import small
from trace_jax.config import ConfigError
from trace_jax.guidance import mantissa_bits
from trace_jax.models import ModelConfig
from trace_jax.models.config import LatentConfig
from trace_jax.models.latent import LatentAttention
from trace_jax.models.layers import LayerInputs
from trace_jax.models.rope import RopeConfig, YarnConfig
from trace_jax.quant import KEY, VALUE, Bf16Numerics, FakeQuantNumerics, QuantPlan

PLAN = QuantPlan()
LATENT = LatentConfig(query_rank=24, latent_rank=32, nope_dim=12, rope_dim=8, value_dim=10)
BATCH, LENGTH, CACHE_LENGTH, HIDDEN, HEADS = 3, 12, 15, 40, 4
LENGTHS = np.array([12, 9, 5])
ROPE = RopeConfig(
    interleaved=True, scaling=YarnConfig(factor=4.0, original_length=64, mscale=1.0, mscale_all_dim=1.0)
)
LAYERS, LAYER = 3, 1
TOLERANCE = 2e-5


MODEL = ModelConfig(
    hidden_size=HIDDEN,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    num_layers=LAYERS,
    layer_types=("latent",),
    latent=LATENT,
    rope=ROPE,
    dtype="float32",
)


@functools.lru_cache
def parameters(config):
    """A layer, its parameters, and inputs; the parameters away from their defaults."""

    @jax.jit
    def init():
        return nnx.split(LatentAttention(config, LAYERS, nnx.Rngs(3)))[1]

    graphdef = nnx.split(nnx.eval_shape(lambda: LatentAttention(config, LAYERS, nnx.Rngs(0))))[0]
    rng = np.random.default_rng(7)
    state = jax.tree.map(lambda leaf: leaf[LAYER] * jnp.float32(rng.uniform(0.7, 1.3)), init())
    x = jnp.asarray(rng.standard_normal((BATCH, LENGTH, HIDDEN)), jnp.float32)
    return graphdef, state, x


POSITIONS = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, LENGTH))
VALID = jnp.asarray(np.arange(LENGTH) < LENGTHS[:, None])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def call(config, graphdef, numerics, state, x, positions, valid, cache, layer):
    with jax.default_matmul_precision("highest"):
        mixer = nnx.merge(graphdef, state)
        return mixer(x, positions, valid, LayerInputs(cache=cache, layer=layer), numerics, config)


def forward(config, numerics, x=None, positions=POSITIONS, valid=VALID, cache=None, layer=None):
    graphdef, state, inputs = parameters(config)
    return call(config, graphdef, numerics, state, inputs if x is None else x, positions, valid, cache, layer)


def empty_cache(config, format, layers=LAYERS, length=CACHE_LENGTH):
    m = config.latent
    return init_latent_cache(
        BATCH, length, m.latent_rank, m.rope_dim, format, layers=layers, dtype=jnp.dtype(config.dtype)
    )


def decode(config, cache, layer):
    """(outputs, cache, captured codes) of one token at a time."""
    x, outputs, codes = parameters(config)[2], [], []
    for t in range(LENGTH):
        column = slice(t, t + 1)
        out, cache, captured = forward(
            config, Bf16Numerics(), x[:, column], POSITIONS[:, column], VALID[:, column], cache, layer
        )
        outputs.append(out)
        codes.append(captured[KEY])
    return (
        jnp.concatenate(outputs, axis=1),
        cache,
        jax.tree.map(lambda *c: jnp.concatenate(c, axis=1), *codes),
    )


def attention_by_hand(config, x, latent=None):
    """The layer in float64, one head of one query at a time, from the definition."""
    state = {
        path[-1]: np.asarray(v.get_value(), np.float64)
        for path, v in nnx.to_flat_state(parameters(config)[1])
    }
    m, x = config.latent, np.asarray(x, np.float64)

    def norm(y, gain):
        return y / np.sqrt(np.mean(y * y, -1, keepdims=True) + config.norm_eps) * gain

    frequencies = np.asarray(config.rope.frequencies(m.rope_dim, jnp.float32), np.float64)

    def turn(y, position):
        pairs = (y[..., 0::2] + 1j * y[..., 1::2]) * np.exp(1j * position * frequencies)
        return np.stack([pairs.real, pairs.imag], -1).reshape(y.shape)

    h = norm(x, state["norm"])
    q = (
        h @ state["query"]
        if m.query_rank is None
        else norm(h @ state["query_down"], state["query_norm"]) @ state["query_up"]
    )
    q = q.reshape(*x.shape[:2], HEADS, -1)
    kv = h @ state["kv_down"]
    latent = (
        norm(kv[..., : m.latent_rank], state["kv_norm"]) if latent is None else np.asarray(latent, np.float64)
    )
    expanded = (latent @ state["kv_up"]).reshape(*x.shape[:2], HEADS, -1)
    growth = config.rope.score_scale
    out = np.zeros((*x.shape[:2], HEADS, m.value_dim))
    for b, t, head in np.ndindex(*x.shape[:2], HEADS):
        scores = []
        for s in range(t + 1):
            score = q[b, t, head, : m.nope_dim] @ expanded[b, s, head, : m.nope_dim]
            score += turn(q[b, t, head, m.nope_dim :], t) @ turn(kv[b, s, m.latent_rank :], s)
            scores.append(score * growth / np.sqrt(m.nope_dim + m.rope_dim))
        weights = np.exp(scores - np.max(scores))
        out[b, t, head] = weights @ expanded[b, : t + 1, head, m.nope_dim :] / weights.sum()
    return x + out.reshape(*x.shape[:2], -1) @ state["output"]


CONFIGS = {
    "low-rank queries": MODEL,
    "direct queries": dataclasses.replace(MODEL, latent=dataclasses.replace(LATENT, query_rank=None)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_definition(name):
    config = CONFIGS[name]
    out, cache, captured = forward(config, Bf16Numerics())
    assert (
        cache is None and captured[KEY].shape == (BATCH, LENGTH, LATENT.latent_rank) and VALUE not in captured
    )
    expected = attention_by_hand(config, parameters(config)[2])
    valid = np.asarray(VALID)
    np.testing.assert_allclose(np.asarray(out)[valid], expected[valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [None, LAYER])
def test_unquantized_prefill_and_decode_are_the_full_forward(layer):
    valid = np.asarray(VALID)
    index = None if layer is None else jnp.int32(layer)
    full, _, _ = forward(MODEL, Bf16Numerics())
    cache = empty_cache(MODEL, None, None if layer is None else LAYERS)
    prefill, filled, captured = forward(MODEL, Bf16Numerics(), cache=cache, layer=index)
    stepped, decoded, _ = decode(MODEL, cache, index)
    assert captured[KEY] is None
    scale = float(jnp.abs(full).max())
    for out in (prefill, stepped):
        assert np.abs(np.asarray(out) - np.asarray(full))[valid].max() < 1e-5 * scale
    for one, other in zip(jax.tree.leaves(filled), jax.tree.leaves(decoded), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_fp4_codes_and_outputs_agree():
    config, valid = MODEL, np.asarray(VALID)
    full, _, captured = forward(config, FakeQuantNumerics(plan=PLAN))
    rows, guide = captured[KEY]
    assert guide is None
    cache = empty_cache(config, PLAN.fp4)
    prefill, filled, captured = forward(config, Bf16Numerics(), cache=cache, layer=jnp.int32(LAYER))
    stepped, decoded, (step_codes, _) = decode(config, cache, jnp.int32(LAYER))
    ours, bits = captured[KEY]
    assert ours.shape == (BATCH, LENGTH, config.latent.latent_rank) and ours.row_exponent.ndim == 2
    assert np.array_equal(bits, mantissa_bits(ours.words))
    trainer = quantize(rows, PLAN.fp4)
    may_differ = np.asarray(small.sensitive(rows, TOLERANCE, PLAN.fp4))
    assert may_differ.mean() < 0.02, "the tolerance would hide real differences"
    same_rows = valid.copy()
    for codes in (step_codes, trainer):
        differs = np.asarray(unpack_codes(ours.words) != unpack_codes(codes.words))
        assert not np.any(differs & ~may_differ & valid[..., None])
        same_rows &= ~np.maximum.accumulate(
            differs.any(-1), axis=1
        )  # a flipped row reaches all later queries
    assert same_rows.sum() > 20
    scale = float(jnp.abs(full).max())
    for out in (prefill, stepped):
        assert np.abs(np.asarray(out) - np.asarray(full))[same_rows].max() < 1e-5 * scale
    # And what they agree on is attention over the rounded latents.
    expected = attention_by_hand(config, parameters(config)[2], dequantize(trainer, jnp.float32))
    np.testing.assert_allclose(np.asarray(full)[valid], expected[valid], rtol=1e-5, atol=1e-5)
    assert np.abs(expected - attention_by_hand(config, parameters(config)[2]))[valid].max() > 1e-2
    for stack in (filled, decoded):
        for b, length in enumerate(LENGTHS):
            words = np.asarray(stack.latent.words)[LAYER, b]
            assert np.array_equal(
                words[:length][same_rows[b, :length]], ours.words[b, :length][same_rows[b, :length]]
            )


def test_only_valid_rows_inside_the_cache_of_one_layer_are_written():
    cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, 3), empty_cache(MODEL, PLAN.fp4, length=10))
    _, after, captured = forward(
        MODEL, Bf16Numerics(), cache=cache, layer=jnp.int32(LAYER), positions=POSITIONS - 1
    )
    written = np.zeros((LAYERS, BATCH, 10), bool)
    for b, length in enumerate(LENGTHS):
        written[LAYER, b, : min(length - 1, 10)] = True  # the first token's position is -1
    before = jax.tree.leaves(cache)
    for old, new in zip(before, jax.tree.leaves(after), strict=True):
        changed = np.asarray(old != new).reshape(*written.shape, -1)
        assert not np.any(changed[~written])
    assert np.array_equal(after.latent.words[LAYER, 0, :9], captured[KEY][0].words[0, 1:10])
    assert np.asarray(before[-1] != jax.tree.leaves(after)[-1]).any(-1)[written].all()


def test_stale_entries_reach_no_output():
    clean, everything = empty_cache(MODEL, None, None), jnp.ones_like(VALID)
    stale = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), clean)
    outs = [forward(MODEL, Bf16Numerics(), valid=everything, cache=cache)[0] for cache in (clean, stale)]
    assert np.array_equal(*outs)


def test_a_sequence_does_not_depend_on_its_batch():
    cache = empty_cache(MODEL, PLAN.fp4)
    x = parameters(MODEL)[2]
    other = x.at[1:].multiply(100.0)
    outs = [forward(MODEL, Bf16Numerics(), y, cache=cache, layer=jnp.int32(LAYER)) for y in (x, other)]
    assert np.array_equal(outs[0][0][0], outs[1][0][0])
    assert np.array_equal(outs[0][2][KEY][0].words[0], outs[1][2][KEY][0].words[0])


def test_gradients_pass_the_rounding_unchanged():
    graphdef, state, x = parameters(MODEL)

    def gradient(numerics):
        return jax.jit(
            jax.grad(
                lambda state: jnp.sum(
                    call(MODEL, graphdef, numerics, state, x, POSITIONS, VALID, None, None)[0] ** 2
                )
            )
        )(state)

    rounded, plain = gradient(FakeQuantNumerics(plan=PLAN)), gradient(Bf16Numerics())
    flat = dict(nnx.to_flat_state(plain))
    for path, leaf in nnx.to_flat_state(rounded):
        one, other = np.asarray(leaf.get_value()), np.asarray(flat[path].get_value())
        assert np.all(np.isfinite(one)) and np.any(one), path
        cosine = np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other)
        assert cosine > 0.95, path


def test_bf16_decode_is_the_full_forward_up_to_its_rounding():
    config, valid = dataclasses.replace(MODEL, dtype="bfloat16"), np.asarray(VALID)
    x = parameters(config)[2].astype(jnp.bfloat16)
    full, _, _ = forward(config, FakeQuantNumerics(plan=PLAN), x)
    cached, cache, _ = forward(config, Bf16Numerics(), x, cache=empty_cache(config, PLAN.fp4, None))
    assert full.dtype == cached.dtype == cache.rope_key.dtype == jnp.bfloat16
    assert isinstance(cache.latent, Fp4Array) and cache.format == PLAN.fp4 and cache.length == CACHE_LENGTH
    gap = np.abs(np.asarray(full, np.float32) - np.asarray(cached, np.float32))[valid]
    assert gap.max() < 0.03 * np.abs(np.asarray(full, np.float32)).max()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"rope_dim is 7"):
        LatentConfig(latent_rank=32, nope_dim=4, rope_dim=7, value_dim=4)
    with pytest.raises(ConfigError, match=r"model\.latent\.query_rank is 0"):
        dataclasses.replace(LATENT, query_rank=0)
    with pytest.raises(ValueError, match="not a multiple of the nvfp4 block"):
        init_latent_cache(1, 4, 24, 8, PLAN.fp4)
    with pytest.raises(ValueError, match="do not fit the cache"):
        forward(MODEL, Bf16Numerics(), cache=empty_cache(MODEL, None), layer=None)
