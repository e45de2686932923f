"""The record derived from the audit sample is the record that the rollout itself makes."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.trace_jax import small
from trace_jax.guidance import RecordError
from trace_jax.rollout.rerecord import rerecord


def test_equals_the_rollouts_own_record():
    rollout = small.rollout("trace_all_sites")
    spec = small.method("trace_all_sites").record_spec(small.MODEL)
    assert small.equal_trees(rerecord(rollout, spec), rollout)


@pytest.mark.parametrize("name", ["trace", "trace_full", "trace_compact_scales"])
def test_has_the_layers_sites_and_arrays_of_its_spec(name):
    spec = small.method(name).record_spec(small.MODEL)
    sites = rerecord(small.rollout("trace_all_sites"), spec).record.sites
    assert set(sites) == set(spec.sites)
    for site in sites.values():
        assert site.row_exponent.shape[0] == len(spec.layers)
        assert (site.mantissa is None, site.words is None) == (spec.mode != "mantissa", spec.mode != "full")


def test_keeps_the_audited_sequences_only():
    rollout = small.rollout("trace_all_sites")
    rows = (1, 4)
    audit = jax.tree.map(lambda leaf: leaf[:, rows], rollout.audit)
    sample = dataclasses.replace(rollout, audit=audit, audit_rows=rows)
    spec = small.method("trace_all_sites").record_spec(small.MODEL)
    kept = rerecord(sample, spec)
    assert len(kept) == 2 and kept.audit_rows == (0, 1)
    np.testing.assert_array_equal(kept.tokens, rollout.tokens[list(rows)])
    key = rollout.record.sites["key"].mantissa
    np.testing.assert_array_equal(kept.record.sites["key"].mantissa, key[:, list(rows)])


def test_without_a_spec_only_routes_are_kept():
    record = rerecord(small.rollout("trace_all_sites"), None).record
    assert record.sites == {} and record.routes.size


def test_refuses_trajectories_without_an_audit_sample():
    rollout = dataclasses.replace(small.rollout("trace_all_sites"), audit=None, audit_rows=())
    with pytest.raises(RecordError, match="no audit sample"):
        rerecord(rollout, None)


def test_refuses_another_format():
    spec = dataclasses.replace(small.method("trace_all_layers"), format="mxfp4").record_spec(small.MODEL)
    with pytest.raises(RecordError, match=r"nvfp4.*the record needs 'expert_input' in mxfp4"):
        rerecord(small.rollout("trace_all_sites"), spec)
