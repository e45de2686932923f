"""The loop: metrics, weight sync and versions, decoupled ratios, NaN, the alarm."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.quantize import dequantize
from tests.trace_jax import small
from trace_jax.data import CharTokenizer, Problem
from trace_jax.models import abstract
from trace_jax.quant import FakeQuantNumerics, QuantPlan, expert_guides
from trace_jax.rl import NonFiniteError, OptimizerConfig, RLConfig
from trace_jax.rl.loop import Loop

SITES = small.ALL_SITES


class Letters:
    """Rewards the share of letters a to g; a short task for a policy that knows nothing."""

    name, max_prompt_tokens = "letters", 6
    tokenizer = CharTokenizer("abcdefghijklmn")

    def __len__(self):
        return 100

    def sample(self, index):
        return Problem(prompt="abc", answer=None, worked=None, metadata={})

    def score(self, completion, problem):
        return sum(char in "abcdefg" for char in completion) / max(len(completion), 1)


PROBLEMS = [Letters().sample(i) for i in range(3)]


def make_loop(method="trace_all_sites", **changes):
    config = RLConfig(
        **{
            "steps": 20,
            "prompts": 3,
            "group_size": 2,
            "max_new_tokens": 10,
            "decode_chunk": 4,
            "audit_sequences": 6,
            "control_every": 2,
        }
        | changes
    )
    loop = Loop(
        graphdef=small.masters()[0],
        model=small.MODEL,
        method=small.method(method),
        config=config,
        optimizer=OptimizerConfig(learning_rate=3e-4),
        task=Letters(),
        prompt_length=6,
    )
    # The same sampler as the other tests': its programs are compiled already.
    assert (loop.sampler.rollout, loop.sampler.sampling) == (small.ROLLOUT, small.SAMPLING)
    assert (loop.sampler.plan, loop.sampler.record) == (small.fp4_sampler().plan, small.fp4_sampler().record)
    loop.sampler = small.fp4_sampler()
    return loop


def start(loop, seed=0):
    loop.start(jax.tree.map(jnp.copy, small.masters()[1]), seed)
    return loop


def step(loop):
    return loop.run_step([list(p) for p in small.PROMPTS], PROBLEMS)


@pytest.fixture(scope="module")
def loop():
    """Decoupled ratio, guided weights, rollouts one version old: everything on, one compiled train step."""
    return make_loop(ratio="decoupled", guide_weights=True, max_version_lag=1)


@pytest.fixture(scope="module")
def run(loop):
    """Metrics of four steps, and what the loop held after each."""
    start(loop)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # an alarm
        for _ in range(4):
            row = step(loop)
            rows.append((row, dict(loop.history), jax.tree.map(np.asarray, loop.train.params)))
    return rows


def test_every_metric_has_its_name(run):
    names = {
        f"mismatch/{n}"
        for n in ("logprob_abs_diff_mean", "logprob_abs_diff_max", "kl_k1", "kl_k3", "ess", "pearson")
    }
    for site in SITES:
        names |= {
            f"alignment/{site}/{n}{suffix}"
            for n in ("d_act", "code_mismatch", "adjacent_share", "scale_mismatch")
            for suffix in ("", "_before")
        }
        names |= {f"alignment/{site}/{n}" for n in ("unguided_share", "saturated_share")}
    names |= {"is/clipped_share", "router/agreement", "guidance/bytes_per_token", "guidance/scale_miss"}
    names |= {
        "routes/bytes_per_token",
        "reward/mean",
        "reward/pass_at_k",
        "time/rollout",
        "time/train",
        "time/sync",
    }
    names |= {"guidance/rows_guided", "guidance/rows_unguided", "guidance/rows_refused"}
    for row, _, _ in run:
        assert names <= set(row), names - set(row)
        for name in names:
            assert np.isfinite(row[name]), name


def test_control_pass_shows_what_guidance_does(run):
    for index, (row, _, _) in enumerate(run):
        control = {name for name in row if name.startswith("control/")}
        assert bool(control) == (index % 2 == 0)
        if control:
            assert (
                row["control/alignment/key/unguided_share"] == 1 and row["alignment/key/unguided_share"] == 0
            )
    first = run[0][0]
    for site in ("expert_input", "key", "value"):
        assert (
            first[f"alignment/{site}/code_mismatch"] < 0.1 * first[f"control/alignment/{site}/code_mismatch"]
        )
    assert first["mismatch/logprob_abs_diff_mean"] < first["control/mismatch/logprob_abs_diff_mean"] / 8


def test_every_fed_row_is_guided_once(run, loop):
    row = run[-1][0]
    fed = int(loop.trajectories.fed.sum())
    c = small.MODEL
    per_token = 1 + c.experts_per_token + 2 * c.num_kv_heads
    assert row["guidance/rows_guided"] == fed * per_token * c.num_layers
    assert (
        row["guidance/rows_unguided"] == 0
        and row["guidance/rows_refused"] == 0
        and row["guidance/alarm"] == 0
    )


@jax.jit
def own_weights(moe):
    numerics = FakeQuantNumerics(plan=QuantPlan())
    return {name: numerics.expert_weight(name, w, None, "bfloat16") for name, w in moe.items()}


def test_trainer_weights_are_the_rollouts_after_every_sync(run):
    previous = None
    for index, (_, history, params) in enumerate(run):
        packed = expert_guides(history[index + 1])
        moe = {name: params["moe"][name].get_value() for name in packed}
        operands = own_weights(moe)
        for name in packed:
            assert np.array_equal(operands[name], dequantize(packed[name]))
        codes = jax.tree.map(np.asarray, packed)
        assert previous is None or not small.equal_trees(codes, previous)  # training moved them
        previous = codes


def test_version_lag(run):
    for index, (row, history, _) in enumerate(run):
        assert row["rollout/version"] == max(0, index - 1)
        assert row["rollout/version_lag"] == min(index, 1)
        assert set(history) == {index, index + 1}


def test_lagging_rollouts_use_the_old_weights(loop, run):
    """The loop's next rollout is that of the version before the newest, by its tokens and in its record."""
    old = loop.version - 1
    keys = jax.random.split(jax.random.fold_in(jax.random.key(loop.seed), loop.step), 6)
    expected = loop.sampler.generate(loop.history[old], small.PROMPTS, keys, weight_version=old)
    newest = loop.sampler.generate(loop.history[old + 1], small.PROMPTS, keys, weight_version=old + 1)
    found = loop.roll_out([list(p) for p in small.PROMPTS])
    assert small.equal_trees(found, expected)
    assert not np.array_equal(found.logprobs, newest.logprobs)
    assert set(np.unique(found.record.weight_version)) == {-1, old}


def test_same_seed_same_run(loop, run):
    start(loop)
    again = step(loop)
    for name, value in run[0][0].items():
        if not name.startswith("time/"):
            np.testing.assert_array_equal(value, again[name], err_msg=name)


def test_equal_rewards_are_counted_and_move_nothing(loop, run, monkeypatch):
    start(loop)
    before = jax.tree.map(np.asarray, loop.train.params)
    monkeypatch.setattr(Letters, "score", lambda self, completion, problem: 1.0)
    row = step(loop)
    assert row["reward/degenerate_groups"] == 3 and row["reward/mean"] == row["reward/pass_at_k"] == 1
    assert row["grad_norm"] == 0 and small.equal_trees(before, jax.tree.map(np.asarray, loop.train.params))


def test_nan_in_the_weights_is_named_and_nothing_is_published(loop, run):
    start(loop)
    params = loop.train.params
    head = params["head"]
    params["head"] = head.replace(head.get_value().at[3, 4].set(np.nan))
    with pytest.raises(NonFiniteError, match="parameter 'head' holds NaN or Inf"):
        loop.sync()
    assert loop.version == 0 and set(loop.history) == {0}
    with pytest.raises(NonFiniteError, match="parameter 'head'"):
        loop.start(params, 0)


def test_checkpoint_state_continues_the_run(loop, run):
    start(loop)
    step(loop)
    arrays, values = jax.tree.map(jnp.copy, loop.arrays()), loop.values()
    assert jax.tree.structure(loop.template(values["step"])) == jax.tree.structure(arrays)
    expected = step(loop)
    start(loop)
    loop.restore(arrays, values)
    again = step(loop)
    for name, value in expected.items():
        if not name.startswith("time/"):
            np.testing.assert_array_equal(value, again[name], err_msg=name)
    with pytest.raises(ValueError, match="written with seed 0, this run has 1"):
        start(loop, seed=1).restore(arrays, values)


def test_refuses_a_minibatch_that_does_not_split():
    with pytest.raises(
        ValueError, match=r"a minibatch of 6 sequences does not split into optimizer.accumulation=4"
    ):
        Loop(
            graphdef=abstract(small.MODEL)[0],
            model=small.MODEL,
            method=small.method("qat"),
            config=small.RL,
            optimizer=OptimizerConfig(accumulation=4),
            task=Letters(),
            prompt_length=6,
        )


def test_alarm_has_a_baseline_for_each_version_lag(loop, run):
    """Weights one update ahead of the rollout's overrule more of its record, which is no misalignment."""
    start(loop)
    step(loop)
    step(loop)
    assert set(loop.alarm.baseline) == {*SITES, *(f"{site}@lag1" for site in SITES)}
    overruled = {name: count for name, (count, _) in loop.alarm.baseline.items()}
    assert sum(overruled[f"{site}@lag1"] for site in SITES) > sum(overruled[site] for site in SITES)


@pytest.mark.slow
def test_an_aligned_run_of_200_steps_raises_no_alarm(loop, run):
    start(loop, seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        rows = [step(loop) for _ in range(200)]
    assert sum(row["guidance/alarm"] for row in rows) == 0
    assert sum(row["guidance/rows_unguided"] for row in rows) == 0
