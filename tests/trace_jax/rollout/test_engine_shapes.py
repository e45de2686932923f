"""Neither the size of pages nor who else has a slot matters: trajectories are the sampler's, to the bit."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.trace_jax import small
from trace_jax.guidance import row_hash
from trace_jax.rollout import Engine, EngineConfig, Programs, Request, collate

KEYS = np.asarray(jax.random.key_data(small.keys_for(small.PROMPTS)))


def by_engine(name: str, slots: int, page_size: int):
    """The rollout of a method by an engine of so many slots."""
    chosen, (graphdef, params) = small.method(name), small.masters()
    plan, length = chosen.rollout_plan(), small.ROLLOUT.prompt_length + small.SAMPLING.max_new_tokens
    config = EngineConfig(
        slots=slots,
        max_length=length,
        page_size=page_size,
        pages=slots * -(-length // page_size),
        chunk=small.ROLLOUT.chunk,
        buckets=(small.ROLLOUT.prompt_length,),
        prefill_tokens=3 * small.ROLLOUT.prompt_length,
        audit_slots=slots if plan else 0,
    )
    programs = Programs(graphdef, small.MODEL, config, plan=plan, record=chosen.record_spec(small.MODEL))
    with Engine(programs) as engine:
        engine.sync(small.sync(params, plan, small.MODEL.dtype), 3)
        rows = np.full((len(KEYS), length, engine.row_bytes), 0xAA, np.uint8)
        for i, prompt in enumerate(small.PROMPTS):
            group = slice(i * small.GROUP, (i + 1) * small.GROUP)
            audit = (plan is not None,) * small.GROUP
            request = Request(
                prompt=prompt,
                sampling=small.SAMPLING,
                seeds=KEYS[group],
                audit=audit,
                rows=tuple(rows[group]),
            )
            engine.submit(request)
        results = sorted(engine.run(), key=lambda result: result.id)
        return collate(results, engine.layout, engine.audit_layout, small.MODEL, length=length, rows=rows)


def fed_only(t):
    """Codes and bits of padding are whatever a program made of it."""
    sites, audit = jax.tree.map(lambda leaf: leaf[:, t.fed], (t.record.sites, t.audit))
    return dataclasses.replace(t, record=dataclasses.replace(t.record, sites=sites), audit=audit)


@pytest.mark.parametrize(
    ("name", "page_size"), [("trace_all_sites", 32), ("trace_all_sites", 8), ("bf16", 32)]
)
def test_give_the_same_trajectories(name, page_size):
    mine, expected = by_engine(name, 6, page_size), small.rollout(name)
    assert small.equal_trees(fed_only(mine), fed_only(expected))


def test_fewer_slots_than_sequences():
    """Products of other shapes sum in another order, so that tokens may differ; records are of the tokens there are."""
    mine = by_engine("trace_all_sites", 3, 32)
    positions = np.broadcast_to(np.arange(mine.tokens.shape[1]), mine.tokens.shape)
    assert np.array_equal(mine.record.row_hash, np.where(mine.fed, row_hash(mine.tokens, positions), 0))
    assert mine.audit_rows == tuple(range(6)) and (mine.length > mine.prompt_length).all()
