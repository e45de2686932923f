"""A named warm start: supervised training on a task's worked answers, in a run folder of its own."""

import dataclasses

import jax

from trace_jax.config import check_range, to_mapping
from trace_jax.data import sft_iterator
from trace_jax.models import ModelConfig, create
from trace_jax.rl.run import graph_definition, with_vocabulary
from trace_jax.rl.supervised import SupervisedConfig, SupervisedTrainer
from trace_jax.runs import Checkpoints, MetricsWriter, Progress, RunFolder
from trace_jax.tasks import TaskConfig, make_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Everything that determines a warm start."""

    name: str
    root: str = "runs"
    seed: int = 0
    model: ModelConfig
    task: TaskConfig
    warmstart: SupervisedConfig = dataclasses.field(default_factory=SupervisedConfig)
    checkpoint_every: int = 100

    def __post_init__(self):
        check_range("", self, "seed", at_least=0, below=2**32)  # JAX's keys tell no more apart
        check_range("", self, "checkpoint_every", at_least=1)


def warm_start(config: WarmStartConfig) -> RunFolder:
    """Trains, resumes, or returns at once when it is already done. The checkpoint holds `train.params`."""
    model = with_vocabulary(config.model, config.task)
    sft = config.warmstart
    task = make_task(dataclasses.replace(config.task, train_size=sft.problems))
    folder = RunFolder.open(config.root, config.name, to_mapping(config), may_change=("root",))
    trainer = SupervisedTrainer(graph_definition(model), model, sft)
    iterator = sft_iterator(task, sft.batch, length=sft.length, seed=config.seed)
    state, step = trainer.init(create(model, jax.random.key(config.seed))[1]), 0
    with Checkpoints(folder.checkpoints_path, keep=1) as checkpoints:
        if checkpoints.latest_step() == sft.steps:
            return folder
        restored = checkpoints.restore({"train": state})
        if restored is not None:
            step, state = restored.step, restored.state["train"]
            iterator.set_state(restored.extra["iterator"])
        progress = Progress(sft.steps, start=step, title=config.name, fields={"loss": "loss"})
        with progress, MetricsWriter(folder, start_step=step) as writer:
            while step < sft.steps:
                batch = next(iterator)
                state, metrics = trainer.step(state, batch["tokens"], batch["loss_mask"])
                metrics = jax.device_get(metrics)
                writer.write(step, metrics)
                step += 1
                progress.update(step, metrics)
                if step % config.checkpoint_every == 0 or step == sft.steps:
                    checkpoints.save(step, {"train": state}, {"iterator": iterator.get_state()})
    return folder
