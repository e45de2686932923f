"""A step that a run stored, opened again: its rollout beside the weights that produced it, under any method."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trace_jax.alignment.report import audit_report
from trace_jax.models import create
from trace_jax.rl.batch import make_batch
from trace_jax.rl.config import OptimizerConfig
from trace_jax.rl.methods import MethodConfig
from trace_jax.rl.optimizer import make_optimizer
from trace_jax.rl.run import RunConfig, graph_definition, load_params, read_run, with_vocabulary
from trace_jax.rl.trainer import Trainer
from trace_jax.rollout import Trajectories, load_trajectories
from trace_jax.rollout.rerecord import rerecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """`params` are the FP32 masters of the version that `trajectories` were sampled with."""

    config: RunConfig
    trajectories: Trajectories
    version: int
    params: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerView:
    """What a method's trainer computes on the audited sequences, before any update.

    `mismatch` as in `alignment.metrics.logprob_mismatch`, `report` as in `alignment.report.audit_report`; `logprobs`
    float32 `[A, S]`; `trajectories` the audited sequences with the method's own record.
    """

    mismatch: dict[str, float]
    report: dict[str, dict[str, np.ndarray]]
    logprobs: np.ndarray
    trajectories: Trajectories


def stored_steps(folder: str | Path) -> list[int]:
    """Steps whose trajectories a run kept (`rl.save_trajectories_every`), ascending."""
    return sorted(int(path.stem) for path in (Path(folder) / "trajectories").glob("*.npz"))


def open_step(folder: str | Path, step: int) -> RecordedStep:
    """Trajectories of `step` and the weights of their version.

    Raises:
        FileNotFoundError: the step's trajectories were not kept.
        CheckpointError: the run has no checkpoint of that version (`rl.checkpoint_every`, `rl.keep_checkpoints`).
    """
    config, _ = read_run(folder)
    path = Path(folder) / "trajectories" / f"{step:06d}.npz"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; steps with trajectories: {stored_steps(folder)}. A run keeps them with "
            "rl.save_trajectories_every=1."
        )
    trajectories = load_trajectories(path)
    version = int(trajectories.record.weight_version.max())
    model = with_vocabulary(config.model, config.task)
    # Version n is what n optimiser steps made of the first weights, and is checkpoint n.
    if version > 0:
        params = load_params(folder, model, step=version)
    elif config.init_from:
        params = load_params(config.init_from, model)
    else:
        params = create(model, jax.random.key(config.seed))[1]
    return RecordedStep(config=config, trajectories=trajectories, version=version, params=params)


def view_as(step: RecordedStep, method: MethodConfig) -> TrainerView:
    """Runs `method`'s trainer forward on the audited sequences under the record that the method would have kept.

    Raises:
        RecordError: there is no audit sample, or it is of another format than the method's.
        ValueError: the method's rollout is BF16, so it could not have sampled these trajectories.
    """
    if method.rollout != "fp4":
        raise ValueError(
            f"method {method.name!r} rolls out in {method.rollout}; the trajectories are from FP4."
        )
    config = step.config
    model = with_vocabulary(config.model, config.task)
    spec = method.record_spec(model)
    trajectories = rerecord(step.trajectories, spec)
    batch = make_batch(
        trajectories,
        np.zeros(len(trajectories), np.float32),
        model=model,
        spec=spec,
        weight_version=step.version,
        replay_routes=config.rl.replay_routes,
    )
    trainer = Trainer(
        graph_definition(model),
        model,
        config.rl,
        make_optimizer(OptimizerConfig(), 1),  # never stepped
        numerics=method.trainer_numerics(len(trajectories)),
        spec=spec,
    )
    mismatch, result = trainer.evaluate(step.params, batch)
    return TrainerView(
        mismatch={name: float(value) for name, value in mismatch.items()},
        report=audit_report(trajectories.audit, result.audit, trajectories.fed),
        logprobs=np.asarray(result.logprobs),
        trajectories=trajectories,
    )
