"""The trainer's view of a rollout: everything checked, all rows or an error."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.trace_jax import small
from trace_jax.guidance import RecordError
from trace_jax.rl import make_batch
from trace_jax.rl.batch import send_rows

NAME = "trace_all_sites"


def make(trajectories, **changes):
    arguments = {
        "model": small.MODEL,
        "spec": small.method(NAME).record_spec(small.MODEL),
        "weight_version": 3,
        "replay_routes": True,
    }
    return make_batch(trajectories, changes.pop("advantages", small.ADVANTAGES), **arguments | changes)


def test_batch_holds_the_rollout():
    t = small.rollout(NAME)
    batch = make(t)
    assert np.array_equal(batch.tokens, t.tokens) and np.array_equal(batch.fed, t.fed)
    assert np.array_equal(batch.sampled, t.sampled) and np.array_equal(batch.rollout_logprobs, t.logprobs)
    assert batch.sites is t.record.sites and batch.routes is t.record.routes
    assert make(t, replay_routes=False).routes is None
    assert batch.without_guidance().sites == {}


def test_rows_take_every_array_along():
    batch = make(small.rollout(NAME))
    part = batch.rows(slice(2, 5))
    assert np.array_equal(part.tokens, batch.tokens[2:5]) and np.array_equal(
        part.routes, batch.routes[:, 2:5]
    )
    for leaf, whole in zip(jax.tree.leaves(part.sites), jax.tree.leaves(batch.sites), strict=True):
        assert np.array_equal(leaf, whole[:, 2:5])


def test_sent_rows_are_the_record():
    t = small.rollout(NAME)
    part = make(t).rows(slice(2, 5))
    for sent in (None, send_rows(t.packed, slice(2, 5))):
        there = part.to_device(sent)
        assert there.packed is None and isinstance(there.routes, jax.Array)
        assert small.equal_trees((there.routes, there.sites), (part.routes, part.sites))


def test_an_exchanged_record_is_what_trains_not_the_bytes_it_came_with():
    t = small.rollout(NAME)
    sites = jax.tree.map(np.copy, t.record.sites)
    exchanged = dataclasses.replace(t, record=dataclasses.replace(t.record, sites=sites))
    batch = make(exchanged)
    assert batch.packed is None and batch.to_device(send_rows(t.packed)).sites is sites


def test_zero_length_responses():
    t = small.rollout(NAME)
    empty = dataclasses.replace(t, length=t.prompt_length.copy())
    with pytest.raises(ValueError, match=r"no response has a single token \(all have zero length\)"):
        make(empty)


def test_wrong_number_of_advantages():
    with pytest.raises(ValueError, match=r"\(5,\) advantages for 6 trajectories; expected one each"):
        make(small.rollout(NAME), advantages=small.ADVANTAGES[:5])


def test_refused_record():
    with pytest.raises(RecordError, match="weight version differs"):
        make(small.rollout(NAME), weight_version=2)
    with pytest.raises(RecordError, match="the trainer guides"):
        make(small.rollout("qat"))
    with pytest.raises(RecordError, match="was taken under"):
        make(
            small.rollout(NAME),
            spec=dataclasses.replace(small.method(NAME).record_spec(small.MODEL), mode="full"),
        )
