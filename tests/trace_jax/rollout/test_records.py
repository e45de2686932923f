"""What a rollout records: exactly the fed rows, shared by a group, the low bits of the codes it computed."""

import dataclasses

import jax
import numpy as np
import pytest

from kernels_pallas.formats import pack_bits, unpack_codes
from tests.trace_jax import small
from trace_jax.guidance import row_hash
from trace_jax.rollout.rerecord import rerecord

NAME = "trace_all_sites"


def test_record_covers_exactly_the_fed_rows():
    t = small.rollout(NAME)
    for n in range(len(t)):
        fed = np.arange(t.tokens.shape[1]) < t.length[n] - 1  # prompt included, the last sampled token not
        assert np.array_equal(t.fed[n], fed)
        assert np.array_equal(t.record.row_hash[n] != 0, fed)
        assert np.array_equal(t.record.weight_version[n], np.where(fed, 3, -1))
        assert np.array_equal(
            t.record.routes[:, n] != 255, np.broadcast_to(fed[None, :, None], t.record.routes[:, n].shape)
        )
        for record in t.record.sites.values():
            recorded = record.row_exponent[:, n] != 0
            assert np.array_equal(
                recorded, np.broadcast_to(fed.reshape(1, -1, *(1,) * (recorded.ndim - 2)), recorded.shape)
            )


def test_hashes_are_those_of_token_and_position():
    t = small.rollout(NAME)
    expected = row_hash(t.tokens, np.asarray(t.positions))
    assert np.array_equal(t.record.row_hash[t.fed], expected[t.fed])


def test_prompts_of_a_group_share_identical_records():
    t = small.rollout(NAME)
    for prompt in range(len(small.PROMPTS)):
        a, b, length = 2 * prompt, 2 * prompt + 1, len(small.PROMPTS[prompt])
        for leaf in (*jax.tree.leaves(t.record.sites), t.record.routes, *jax.tree.leaves(t.audit)):
            assert np.array_equal(leaf[:, a, :length], leaf[:, b, :length])


def test_record_is_the_low_bits_of_the_audited_codes():
    t = small.rollout(NAME)
    assert set(t.audit) == set(t.record.sites) and t.audit_rows == tuple(range(6))
    for site, audit in t.audit.items():
        record, fed = t.record.sites[site], t.fed
        codes = np.asarray(unpack_codes(jax.numpy.asarray(audit.words)))
        assert np.array_equal(
            record.mantissa[:, fed], np.asarray(pack_bits(jax.numpy.asarray(codes & 1)))[:, fed]
        )
        assert np.array_equal(record.scales[:, fed], audit.scales[:, fed])
        assert np.array_equal(record.row_exponent[:, fed], audit.row_exponent[:, fed])
        assert not (codes == 8).any()


def test_records_derived_from_the_audit_are_the_rollouts_own():
    """The helper that gives other methods their record is held to the real thing."""
    t = small.rollout(NAME)
    derived = rerecord(t, small.method(NAME).record_spec(small.MODEL)).record
    for site, record in t.record.sites.items():
        for name in ("row_exponent", "scales", "mantissa"):
            mine, theirs = getattr(derived.sites[site], name), getattr(record, name)
            assert np.array_equal(mine[:, t.fed], theirs[:, t.fed])
        assert derived.sites[site].site == record.site and derived.sites[site].spec == record.spec


def test_bf16_rollout_has_routes_and_hashes_but_no_sites():
    t = small.rollout("bf16")
    assert t.record.sites == {} and t.audit is None and t.audit_rows == ()
    assert np.array_equal(t.record.row_hash != 0, t.fed)
    assert (t.record.routes[:, t.fed] < small.MODEL.num_experts).all() and t.sampled.any()


def test_trajectories_views():
    t = small.rollout(NAME)
    assert np.array_equal(t.sampled.sum(axis=1), t.length - t.prompt_length)
    assert not (t.sampled & (t.positions < t.prompt_length[:, None])).any()
    assert t.response(0) == t.tokens[0][t.sampled[0]].tolist()
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.tokens = None
