"""Every family from its checkpoint: reference logits, and a cache that gives the same as the full forward, in FP32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.check_hf import logits_of, read_reference
from kernels_pallas.arrays import Stacked
from tests.trace_jax.families import FAMILIES, ROOT, config_of
from trace_jax.hf import load_model
from trace_jax.models import abstract, init_cache
from trace_jax.quant import Bf16Numerics, arranged_for_kernels

TOLERANCE = 1e-4
PROMPTS = np.array([24, 11])


@functools.cache
def checkpoint(family):
    config = dataclasses.replace(config_of(family), dtype="float32")
    return config, load_model(ROOT / family).params


@functools.cache
def full_forward(family):
    config, params = checkpoint(family)
    tokens, expected = read_reference(str(ROOT / family / "reference.npz"), config.vocab_size)
    with jax.default_matmul_precision("highest"):
        return tokens, expected, np.asarray(logits_of(config, params, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_reference(family):
    _, expected, logits = full_forward(family)
    assert np.abs(logits - expected).max() < TOLERANCE
    assert np.array_equal(logits.argmax(-1), expected.argmax(-1))


@functools.partial(jax.jit, static_argnums=0)
def feed(config, params, tokens, positions, valid, cache):
    model = nnx.merge(abstract(config)[0], params)
    out = model(tokens, positions, valid, numerics=Bf16Numerics(), cache=cache)
    return model.logits(out.hidden), out.cache


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "gpt_oss", "deepseek_v3"])
def test_stacks_that_are_not_cut_give_the_same(family, monkeypatch):
    """Every projection, by its index in a stack, as a rollout's kernels on a GPU take it."""
    config, params = checkpoint(family)
    monkeypatch.setattr("trace_jax.quant.weights.arranged", lambda w, gated: Stacked(w, jnp.int32(0)))
    stacked = arranged_for_kernels(params)
    values = [leaf.get_value() for _, leaf in nnx.to_flat_state(stacked)]
    assert sum(isinstance(value, Stacked) for value in values) >= 6
    tokens, _, _ = full_forward(family)
    tokens = tokens[:, : PROMPTS.max()]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    valid = positions < PROMPTS[:, None]
    cache = init_cache(config, len(tokens), full_forward(family)[0].shape[1], None)
    expected, found = (feed(config, p, tokens, positions, valid, cache)[0] for p in (params, stacked))
    np.testing.assert_allclose(np.asarray(found)[valid], np.asarray(expected)[valid], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_give_the_logits_of_the_full_forward(family):
    """Prompts of unequal length, then token by token; a sequence that has ended changes nothing."""
    config, params = checkpoint(family)
    tokens, _, expected = full_forward(family)
    length = tokens.shape[1]
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    with jax.default_matmul_precision("highest"):
        bucket = PROMPTS.max()
        valid = positions[:, :bucket] < PROMPTS[:, None]
        padded = np.where(valid, tokens[:, :bucket], 0)
        cache = init_cache(config, len(tokens), length, None)
        logits, cache = feed(config, params, padded, positions[:, :bucket], valid, cache)
        assert np.abs(np.asarray(logits) - expected[:, :bucket])[valid].max() < TOLERANCE
        for step in range(length - PROMPTS.min()):
            at = PROMPTS + step
            fed = at < length
            if not fed.any():
                break
            at = np.minimum(at, length - 1)
            column = np.take_along_axis(tokens, at[:, None], axis=1)
            logits, cache = feed(config, params, column, at[:, None].astype(np.int32), fed[:, None], cache)
            wanted = np.take_along_axis(expected, at[:, None, None], axis=1)
            assert np.abs(np.asarray(logits) - wanted)[fed].max() < TOLERANCE, f"step {step}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_two_parts_gives_the_same(family):
    """Prefill goes on from a cache that is not empty."""
    config, params = checkpoint(family)
    tokens, _, expected = full_forward(family)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cache = init_cache(config, len(tokens), tokens.shape[1], None)
    with jax.default_matmul_precision("highest"):
        for part in (slice(0, 24), slice(24, 40)):
            columns = tokens[:, part]
            logits, cache = feed(config, params, columns, positions[:, part], columns >= 0, cache)
            assert np.abs(np.asarray(logits) - expected[:, part]).max() < TOLERANCE
