"""Sampling from logits, and the log-probs of what was sampled from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rollout import SamplingConfig, scale_logits, token_logprobs
from trace_jax.rollout.sampling import Draws, sample

ROWS, VOCAB = 512, 8
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -8.0], np.float32)
draw = jax.jit(sample, static_argnames="plain")


def draws(configs, keys):
    """What `sample` takes for rows that are sampled by one config each."""
    return Draws(
        inverse_temperature=jnp.array(
            [1 / c.temperature if c.temperature else 0 for c in configs], jnp.float32
        ),
        top_k=jnp.array([c.top_k for c in configs], jnp.int32),
        top_p=jnp.array([c.top_p for c in configs], jnp.float32),
        min_p=jnp.array([c.min_p for c in configs], jnp.float32),
        keys=keys,
    )


def drawn(config, seed=0, plain=False):
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (ROWS, VOCAB))
    keys = jax.random.split(jax.random.key(seed), ROWS)
    sampled = draw(logits, draws([config] * ROWS, keys), plain=plain)
    np.testing.assert_allclose(
        sampled.raw_logprobs, log_softmax(LOGITS)[np.asarray(sampled.tokens)], rtol=1e-5, atol=1e-6
    )
    return np.asarray(sampled.tokens), np.asarray(sampled.logprobs)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("plain", [True, False])
def test_tokens_follow_the_distribution_and_log_probs_are_its_own(plain):
    tokens, logprobs = drawn(SamplingConfig(), plain=plain)
    expected = log_softmax(LOGITS)
    np.testing.assert_allclose(logprobs, expected[tokens], rtol=1e-5, atol=1e-6)
    share = np.bincount(tokens, minlength=VOCAB) / ROWS
    assert np.abs(share - np.exp(expected)).max() < 0.08  # over three standard deviations of 512 draws


def test_temperature_applies_to_the_log_probs():
    tokens, logprobs = drawn(SamplingConfig(temperature=0.5))
    np.testing.assert_allclose(logprobs, log_softmax(LOGITS / 0.5)[tokens], rtol=1e-5, atol=1e-6)


def test_greedy():
    tokens, logprobs = drawn(SamplingConfig(temperature=0.0))
    assert (tokens == 0).all() and (logprobs == 0).all()


def test_top_k():
    tokens, logprobs = drawn(SamplingConfig(top_k=3))
    assert set(tokens) == {0, 1, 2}
    np.testing.assert_allclose(logprobs, log_softmax(LOGITS[:3])[tokens], rtol=1e-5, atol=1e-6)
    assert np.array_equal(drawn(SamplingConfig(top_k=1))[0], np.zeros(ROWS))
    assert np.array_equal(drawn(SamplingConfig(top_k=100))[0], drawn(SamplingConfig())[0])


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    mass = np.cumsum(np.exp(log_softmax(LOGITS)))
    for top_p, kept in ((mass[1] - 1e-3, 2), (mass[1] + 1e-3, 3), (1e-6, 1)):
        tokens, logprobs = drawn(SamplingConfig(top_p=float(top_p)))
        assert set(tokens) == set(range(kept))
        np.testing.assert_allclose(logprobs, log_softmax(LOGITS[:kept])[tokens], rtol=1e-5, atol=1e-6)


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    share = np.exp(LOGITS - LOGITS[0])
    for min_p, kept in ((share[2] * 0.99, 3), (share[2] * 1.01, 2), (0.99, 1)):
        tokens, logprobs = drawn(SamplingConfig(min_p=float(min_p)))
        assert set(tokens) == set(range(kept))
        np.testing.assert_allclose(logprobs, log_softmax(LOGITS[:kept])[tokens], rtol=1e-5, atol=1e-6)


def test_truncations_together_keep_what_all_of_them_keep():
    tokens, _ = drawn(SamplingConfig(top_k=5, top_p=0.99, min_p=float(np.exp(LOGITS[3] - LOGITS[0]) * 0.99)))
    assert set(tokens) == set(range(4))


KINDS = (
    SamplingConfig(),
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=0.7, top_k=3),
    SamplingConfig(top_p=0.6),
    SamplingConfig(min_p=0.3),
)


def test_a_row_depends_on_its_own_key_logits_and_config_only(rng):
    logits = rng.standard_normal((ROWS, VOCAB)).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), ROWS)
    configs = [KINDS[i % len(KINDS)] for i in range(ROWS)]
    mixed = draw(jnp.asarray(logits), draws(configs, keys), plain=False)
    order = rng.permutation(ROWS)
    permuted = draw(jnp.asarray(logits[order]), draws([configs[i] for i in order], keys[order]), plain=False)
    for kind in KINDS:
        alone = draw(jnp.asarray(logits), draws([kind] * ROWS, keys), plain=False)
        own = np.array([c is kind for c in configs])
        for field in ("tokens", "logprobs", "raw_logprobs"):
            of_mixed = np.asarray(getattr(mixed, field))
            assert np.array_equal(of_mixed[own], np.asarray(getattr(alone, field))[own])
            assert np.array_equal(getattr(permuted, field), of_mixed[order])
    plain = draw(jnp.asarray(logits), draws([KINDS[0]] * ROWS, keys), plain=True)
    own = np.array([c is KINDS[0] for c in configs])
    assert np.array_equal(np.asarray(plain.tokens)[own], np.asarray(mixed.tokens)[own])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs(rng, temperature):
    logits = rng.standard_normal((2, 5, VOCAB)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, (2, 5)).astype(np.int32)
    run = jax.jit(functools.partial(token_logprobs, temperature=temperature))
    logprobs, entropy = run(jnp.asarray(logits), jnp.asarray(tokens))
    full = log_softmax(logits / temperature)
    for b in range(2):
        assert logprobs[b, 0] == 0 and entropy[b, 0] == 0
        for t in range(1, 5):
            np.testing.assert_allclose(logprobs[b, t], full[b, t - 1, tokens[b, t]], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                entropy[b, t], -(np.exp(full[b, t - 1]) * full[b, t - 1]).sum(), rtol=1e-5
            )


def test_scaled_logits_are_shared_with_the_trainer():
    logits = jnp.asarray(LOGITS)
    assert scale_logits(logits, 1.0) is logits
    np.testing.assert_allclose(scale_logits(logits, 0.5), LOGITS * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; expected a finite number at least 0"),
        ({"top_k": -1}, "top_k is -1; expected 0"),
        ({"top_p": 0.0}, r"top_p is 0.0; expected a share in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 1.0}, "min_p is 1.0; expected a finite number at least 0 and below 1"),
        ({"stop_tokens": tuple(range(9))}, "stop_tokens are 9; expected at most 8"),
        ({"stop_strings": ("a", "")}, "stop_strings hold an empty string"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected at least 1"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**changes)


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_truncated_sampling_is_refused_in_training(changes):
    SamplingConfig().check_for_training()
    with pytest.raises(ValueError, match="training needs the full distribution"):
        SamplingConfig(**changes).check_for_training()
