"""The sampler: determinism, independence of company, log-probs, ends of responses, waves, errors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.trace_jax import small
from trace_jax.models import init_cache
from trace_jax.quant import PackedNumerics, QuantPlan
from trace_jax.rollout import RolloutConfig, SamplingConfig
from trace_jax.rollout.executor import Executor

PLAN = QuantPlan()
NEW = small.SAMPLING.max_new_tokens


def weights():
    return small.sync(small.masters()[1], PLAN, "bfloat16")


def generate(prompts, keys, version=3):
    return small.fp4_sampler().generate(weights(), prompts, keys, weight_version=version)


def of_sequence(t, n):
    """Everything that a request leaves behind, without padding."""
    length = int(t.length[n])
    rows = {
        site: jax.tree.map(lambda leaf: leaf[:, n, : length - 1], record)
        for site, record in t.record.sites.items()
    }
    return {
        "tokens": t.tokens[n, :length],
        "logprobs": t.logprobs[n, :length],
        "hash": t.record.row_hash[n, :length],
        "routes": t.record.routes[:, n, : length - 1],
        "sites": rows,
    }


def same(a, b):
    return small.equal_trees(a, b)


def test_same_seed_same_rollout():
    first, again = small.rollout("trace_all_sites"), generate(small.PROMPTS, small.keys_for(small.PROMPTS))
    assert same(first, again)
    other = generate(small.PROMPTS, small.keys_for(small.PROMPTS, seed=8))
    assert not np.array_equal(other.tokens, first.tokens)


def test_samples_of_a_group_differ():
    t = small.rollout("trace_all_sites")
    assert not np.array_equal(t.tokens[0], t.tokens[1])


def test_a_request_does_not_depend_on_its_company_or_slot():
    """The same prompt and keys, alone, with other companions, in another group, in another wave."""
    first = small.rollout("trace_all_sites")
    keys = small.keys_for(small.PROMPTS)
    other_keys = small.keys_for(small.PROMPTS, seed=99)
    alone = generate([small.PROMPTS[1]], keys[2:4])
    last = generate(
        [[1, 9], [1, 3, 3, 3, 3, 3], small.PROMPTS[1]], jnp.concatenate([other_keys[:4], keys[2:4]])
    )
    wave = generate([[4], [5], [6], small.PROMPTS[1]], jnp.concatenate([other_keys, keys[2:4]]))
    swapped = generate([small.PROMPTS[1], [7, 7]], jnp.concatenate([keys[3:4], keys[2:3], other_keys[:2]]))
    for sample in range(2):
        expected = of_sequence(first, 2 + sample)
        assert same(of_sequence(alone, sample), expected)
        assert same(of_sequence(last, 4 + sample), expected)
        assert same(of_sequence(wave, 6 + sample), expected)
        assert same(of_sequence(swapped, 1 - sample), expected)


@functools.partial(jax.jit, static_argnums=0)
def step(graphdef, params, tokens, positions, cache):
    model = nnx.merge(graphdef, params)
    valid = jnp.ones(tokens.shape, bool)
    out = model(tokens, positions, valid, numerics=PackedNumerics(plan=PLAN), cache=cache)
    return jax.nn.log_softmax(model.logits(out.hidden[:, 0]), axis=-1), out.cache


def test_log_probs_against_a_token_by_token_recomputation():
    """Every token fed singly, by hand: the log-probs of the sampled tokens are those of the policy that drew them."""
    t = small.rollout("trace_all_sites")
    graphdef = small.masters()[0]
    cache = init_cache(small.MODEL, len(t), t.tokens.shape[1], PLAN.fp4)
    gaps = []
    for position in range(t.tokens.shape[1] - 1):
        column = np.full((len(t), 1), position, np.int32)
        logprobs, cache = step(graphdef, weights(), t.tokens[:, position : position + 1], column, cache)
        chosen = np.take_along_axis(np.asarray(logprobs), t.tokens[:, position + 1 :][:, :1], axis=1)[:, 0]
        rows = t.sampled[:, position + 1]
        gaps += list(np.abs(chosen - t.logprobs[:, position + 1])[rows])
    assert len(gaps) == t.sampled.sum() > 20
    # A prompt row's codes may flip against the prefill's (another GEMM shape), so not every gap is zero.
    assert np.median(gaps) < 1e-3 and max(gaps) < 0.3


def test_log_probs_are_zero_where_nothing_was_sampled():
    t = small.rollout("trace_all_sites")
    assert not np.any(t.logprobs[~t.sampled]) and (t.logprobs[t.sampled] < 0).all()


def test_responses_end_at_a_stop_token_or_at_the_limit():
    t = small.rollout("trace_all_sites")
    lengths = t.length - t.prompt_length
    assert lengths.min() < NEW and lengths.max() == NEW  # the case has both ends
    for n in range(len(t)):
        response = t.response(n)
        assert len(response) == lengths[n] and small.STOP not in response[:-1]
        assert (response[-1] == small.STOP) == (lengths[n] < NEW) or lengths[n] == NEW
        prompt = small.PROMPTS[n // small.GROUP]
        assert t.prompt_length[n] == len(prompt) and list(t.tokens[n, : len(prompt)]) == prompt
        assert not np.any(t.tokens[n, t.length[n] :])


def test_decoding_stops_when_all_are_done(monkeypatch):
    calls = []
    original = Executor.launch

    def counted(self):
        launched = original(self)
        calls.extend([1] * launched)
        return launched

    monkeypatch.setattr(Executor, "launch", counted)
    chunks = []
    for seed in range(30):
        calls.clear()
        t = generate([small.PROMPTS[0]], small.keys_for([0], seed=seed))
        longest = int((t.length - t.prompt_length).max())
        # The first token is the prefill's.
        assert len(calls) == math.ceil((longest - 1) / small.ROLLOUT.chunk)
        chunks.append(len(calls))
    assert min(chunks) < max(chunks) == math.ceil((NEW - 1) / small.ROLLOUT.chunk)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_more_and_fewer_prompts_than_slots(count):
    prompts = [small.PROMPTS[i % 3] for i in range(count)]
    t = generate(prompts, small.keys_for(prompts))
    assert len(t) == count * small.GROUP
    assert t.record.row_hash.shape == t.tokens.shape and t.record.routes.shape[1] == len(t)
    assert all(leaf.shape[1] == len(t) for leaf in jax.tree.leaves(t.record.sites))
    assert t.audit_rows == tuple(range(len(t)))
    assert all(leaf.shape[1] == len(t) for leaf in jax.tree.leaves(t.audit))
    assert (t.length > t.prompt_length).all()


@pytest.mark.parametrize(
    ("prompts", "keys", "message"),
    [
        ([], 0, "no prompts to roll out; the task is empty"),
        ([[1, 2], []], 4, "prompt 1 has 0 tokens; expected 1 to 6"),
        ([[1] * 7], 2, r"prompt 0 has 7 tokens; expected 1 to 6 \(the cache holds 16 tokens, 10 of them"),
        ([[1]], 3, "3 keys for 1 prompts x 2 responses"),
    ],
)
def test_refuses(prompts, keys, message):
    with pytest.raises(ValueError, match=message):
        generate(prompts, jax.random.split(jax.random.key(0), keys))


def test_refuses_stop_strings():
    with pytest.raises(ValueError, match="a sampler knows no text"):
        small.sampler(None, None, sampling=SamplingConfig(stop_strings=("a",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 0}, "rollout.num_prompts is 0; expected at least 1"),
        ({"chunk": 0}, "rollout.chunk is 0"),
        ({"audit_rows": (6,)}, r"audit_rows \(6,\) lie outside the 6 sequences"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**{"num_prompts": 3, "group_size": 2, "prompt_length": 4} | changes)
