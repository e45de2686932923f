"""Records whose keys are forged raise the health alarm; aligned ones never do."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.trace_jax import small
from trace_jax.guidance import HealthAlarm
from trace_jax.guidance.alarm import CHANCE, FLOOR, MIN_COUNT
from trace_jax.rollout.rerecord import rerecord

NAME = "trace_all_sites"


def counts_under(trajectories, name=NAME, model=small.MODEL):
    """(overruled, total) by site at the first guided layer, from a record that passed every check."""
    batch = small.batch(name, trajectories, model=model)
    _, result = small.trainer(name, model=model).evaluate(small.masters(model)[1], batch)
    return {site: (int(c.overruled[0]), int(c.values[0])) for site, c in result.counts.items()}


def forged(sites):
    """The sites' arrays with the keys of the right record: hash, version, site names and spec all fit."""
    t = small.rollout(NAME)
    return dataclasses.replace(t, record=dataclasses.replace(t.record, sites=sites))


def shifted():
    return jax.tree.map(lambda leaf: np.roll(leaf, 1, axis=2), small.rollout(NAME).record.sites)


def exchanged():
    sites = small.rollout(NAME).record.sites
    key, value = sites["key"], sites["value"]
    return sites | {
        "key": dataclasses.replace(value, site="key"),
        "value": dataclasses.replace(key, site="value"),
    }


def stale(moved=0.1):
    """The same tokens under other weights: every weight `moved` by that share of itself since."""
    t = small.rollout(NAME)
    unguided = small.batch(NAME).without_guidance()
    _, result = small.trainer(NAME).evaluate(small.perturbed(small.masters()[1], moved, 9), unguided)
    codes = {site: audit.own for site, audit in jax.device_get(result.audit).items()}
    return rerecord(
        dataclasses.replace(t, audit=codes), small.method(NAME).record_spec(small.MODEL)
    ).record.sites


@pytest.fixture(scope="module")
def baseline():
    return counts_under(small.rollout(NAME))


def test_an_aligned_record_raises_nothing(baseline):
    alarm = HealthAlarm()
    assert alarm.observe(baseline) == []
    assert alarm.observe(baseline) == []
    for overruled, total in baseline.values():
        assert overruled < 0.03 * total and total > 1000


@pytest.mark.parametrize("forge", [shifted, exchanged, stale], ids=lambda f: f.__name__)
@pytest.mark.parametrize("first_step", [False, True])
def test_forged_records_raise_it(baseline, forge, first_step):
    alarm = HealthAlarm() if first_step else HealthAlarm(dict(baseline))
    messages = alarm.observe(counts_under(forged(forge())))
    assert messages and all(
        "The record is probably shifted, stale or foreign" in message for message in messages
    )


@pytest.mark.parametrize("moved, later, first", [(0.01, True, False), (0.001, False, False)])
def test_what_it_cannot_see(baseline, moved, later, first):
    """Weights moved by a hundredth raise it once a baseline is set, not in the first step; a thousandth never does."""
    counts = counts_under(forged(stale(moved)))
    assert bool(HealthAlarm(dict(baseline)).observe(counts)) == later
    assert bool(HealthAlarm().observe(counts)) == first


# The first guided layer of `trace` lies behind eight unguided ones, where right records overrule many values too;
# `trace_scale` has no bit to overrule anything, only scales.
DEEP = dataclasses.replace(small.MODEL, num_layers=16)


@pytest.mark.parametrize(
    "name, model", [("trace", DEEP), ("trace_scale", small.MODEL)], ids=("deep", "scale")
)
@pytest.mark.parametrize("first_step", [False, True])
def test_forged_records_raise_it_for_other_methods(name, model, first_step):
    right = small.rollout(name, model)
    baseline = counts_under(right, name, model)
    alarm = HealthAlarm()
    assert alarm.observe(baseline) == []
    sites = jax.tree.map(lambda leaf: np.roll(leaf, 1, axis=2), right.record.sites)
    wrong = dataclasses.replace(right, record=dataclasses.replace(right.record, sites=sites))
    alarm = HealthAlarm() if first_step else alarm
    assert alarm.observe(counts_under(wrong, name, model))


def test_padding_of_a_shifted_record_is_unguided_not_an_error(baseline):
    counts = counts_under(forged(shifted()))
    assert all(total <= baseline[site][1] for site, (_, total) in counts.items())


def test_limits():
    alarm = HealthAlarm({"low": (1, 10_000), "middle": (200, 10_000), "high": (900, 10_000)})
    assert alarm.limit("low") == FLOOR and alarm.limit("middle") == 0.16
    assert alarm.limit("high") == (0.09 + CHANCE) / 2
    assert alarm.observe({"middle": (1600, 10_000)}) == []
    (message,) = alarm.observe({"middle": (1601, 10_000)})
    assert "guidance alarm at 'middle': the record overrules 16.0%" in message and "limit 16.0%" in message


def test_a_handful_of_flips_is_no_alarm():
    alarm = HealthAlarm({"key": (0, 10_000)})
    assert alarm.observe({"key": (MIN_COUNT - 1, 60)}) == []
    assert len(alarm.observe({"key": (MIN_COUNT, 60)})) == 1


def test_no_guided_rows_set_no_baseline():
    alarm = HealthAlarm()
    assert alarm.observe({"key": (0, 0)}) == [] and alarm.baseline == {}


def test_baseline_is_the_first_step():
    alarm = HealthAlarm()
    alarm.observe({"key": (100, 10_000)})
    alarm.observe({"key": (300, 10_000)})
    assert alarm.baseline == {"key": (100, 10_000)}
