"""Bad input: each a clear error, and nothing lost."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common import method_config
from tests.experiments.settings import composed, run_config
from trace_jax.config import ConfigError, from_mapping
from trace_jax.data import DataError
from trace_jax.quant import PlanError
from trace_jax.rl import NonFiniteError
from trace_jax.rl.run import RunConfig, load_params, make_loop, train
from trace_jax.rl.trainer import Trainer
from trace_jax.runs import CheckpointError, Checkpoints, RunFolderError, read_metrics
from trace_jax.tasks import TaskError

REPOSITORY = Path(__file__).resolve().parents[2]


def test_unknown_config_key(tmp_path):
    config = composed("train", "+rl.learning_rte=1")
    with pytest.raises(ConfigError, match=r"rl\.learning_rte"):
        from_mapping(RunConfig, config)


def test_unknown_method_lists_the_presets():
    with pytest.raises(ConfigError, match=r"unknown method 'tracee'.*trace_all_layers"):
        method_config("tracee")


@pytest.mark.parametrize("override", ["rl.stps=3", "method=tracee"])
def test_the_command_line_refuses_and_says_what_exists(tmp_path, override):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", f"root={tmp_path}", override],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert override.split("=")[0].split(".")[-1] in done.stderr or "tracee" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "override, name, padded",
    [("model.head_dim=24", "head_dim", 32), ("model.hidden_size=40", "hidden_size", 48)],
)
def test_a_size_that_cuts_blocks(tmp_path, override, name, padded):
    with pytest.raises(
        PlanError, match=rf"model\.{name} is .*not a multiple of the nvfp4 block of 16.*{padded}"
    ):
        make_loop(run_config(tmp_path, override))


def test_mxfp4_needs_larger_blocks(tmp_path):
    with pytest.raises(PlanError, match=r"head_dim is 16, not a multiple of the mxfp4 block of 32"):
        make_loop(run_config(tmp_path, "method.format=mxfp4"))


def test_an_empty_task(tmp_path):
    with pytest.raises(TaskError, match=r"empty.*train_size is 0"):
        make_loop(run_config(tmp_path, "task.train_size=0"))


def test_a_prompt_longer_than_the_cache(tmp_path):
    with pytest.raises(DataError, match=r"max_prompt_tokens is 3"):
        train(run_config(tmp_path, "task.max_prompt_tokens=3"))
    assert not any(tmp_path.iterdir())  # the name is still free


def test_a_held_out_set_that_is_empty(tmp_path):
    with pytest.raises(TaskError, match=r"empty.*eval_size is 0"):
        train(run_config(tmp_path, "task.eval_size=0", "rl.evaluate_every=1"))
    assert not any(tmp_path.iterdir())


def test_guided_down_inputs_need_the_recorded_experts(tmp_path):
    with pytest.raises(ConfigError, match=r"'trace_all_sites' guides 'down_input'.*Replay routes"):
        make_loop(run_config(tmp_path, "method=trace_all_sites", "rl.replay_routes=false"))


def test_audited_sequences_of_a_microbatch(tmp_path):
    with pytest.raises(ConfigError, match=r"audit_sequences is 3; expected at most the 2 sequences"):
        make_loop(run_config(tmp_path, "rl.audit_sequences=3", "optimizer.accumulation=4"))


def test_a_vocabulary_that_is_too_small(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size is 5.*17 ids"):
        make_loop(run_config(tmp_path, "model.vocab_size=5"))


def test_a_warm_start_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        train(run_config(tmp_path, f"init_from={tmp_path / 'nowhere'}"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 2 steps with a checkpoint after each, and its loop (compiled)."""
    root = tmp_path_factory.mktemp("finished")
    config = run_config(root, "name=run", "rl.steps=2", "rl.checkpoint_every=1", "method=trace_all_layers")
    loop = make_loop(config)
    train(config, loop=loop)
    return config, loop


def test_a_resume_under_another_config(finished):
    config, _ = finished
    other = dataclasses.replace(config, seed=1)
    with pytest.raises(RunFolderError, match=r"seed: 0 in the run, 1 now"):
        train(other)


def test_a_truncated_checkpoint_names_the_file_and_the_good_one(finished, tmp_path):
    config, loop = finished
    folder = Path(config.root) / "run" / "checkpoints"
    file = max((f for f in (folder / "2").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    try:
        with pytest.raises(CheckpointError, match=r"checkpoints/2 cannot be restored.*Intact checkpoints: 1"):
            train(config, loop=loop)
    finally:
        file.write_bytes(whole)
    train(config, loop=loop)  # whole again: nothing was lost


def test_a_checkpoint_of_another_model(finished):
    config, _ = finished
    other = dataclasses.replace(config.model, num_layers=3, vocab_size=17)
    with pytest.raises(CheckpointError, match=r"attention\.norm.*\[2, 32\].*\[3, 32\]"):
        load_params(Path(config.root) / "run", other)


def test_nan_in_the_weights_is_named_and_the_last_good_checkpoint_stays(finished, tmp_path, monkeypatch):
    config, loop = finished
    config = dataclasses.replace(
        config, root=str(tmp_path), rl=dataclasses.replace(config.rl, steps=4), name="poisoned"
    )
    step = Trainer.step

    def poison_third(self, state, *args, **kwargs):
        state, *rest = step(self, state, *args, **kwargs)
        if loop.step == 2:
            down = state.params["moe"]["down"]
            down.set_value(down.get_value().at[1, 0, 0, 0].set(jnp.nan))
        return (state, *rest)

    monkeypatch.setattr(Trainer, "step", poison_third)
    with pytest.raises(NonFiniteError, match=r"moe\.down.*NaN or Inf \(1 of"):
        train(config, loop=loop)
    checkpoints = Checkpoints(tmp_path / "poisoned" / "checkpoints")
    assert checkpoints.latest_step() == 2
    params = load_params(tmp_path / "poisoned", loop.model)
    assert np.isfinite(np.asarray(params["moe"]["down"].get_value())).all()
    assert [row["step"] for row in read_metrics(tmp_path / "poisoned" / "metrics.jsonl")] == [0, 1]


def test_all_equal_rewards_train_nothing(finished, tmp_path, monkeypatch):
    """A group that says nothing about the policy gives zero advantages, not NaN."""
    config, loop = finished
    config = dataclasses.replace(config, root=str(tmp_path), name="equal")
    monkeypatch.setattr(type(loop.task), "score", lambda self, completion, problem: 1.0)
    run = train(config, loop=loop)
    assert all(row["reward/degenerate_groups"] == config.rl.prompts for row in run.rows)
    assert all(row["grad_norm"] == 0.0 for row in run.rows)
