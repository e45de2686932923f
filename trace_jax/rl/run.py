"""One named RL run: wiring, resume, metrics, checkpoints."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from trace_jax.alignment.summary import Run
from trace_jax.config import ConfigError, check_range, from_mapping, to_mapping
from trace_jax.data import check_own_tokenizer, encode_prompt, prompt_iterator, smollm2_file
from trace_jax.hf import is_hf_folder, load_model, read_model_config
from trace_jax.models import (
    ModelConfig,
    abstract,
    check_same_model,
    create,
    load_llama,
    logical_axes,
    run_like,
)
from trace_jax.parallel import MeshConfig, make_mesh, shard
from trace_jax.rl.config import OptimizerConfig, RLConfig
from trace_jax.rl.evaluation import Evaluator
from trace_jax.rl.loop import Loop
from trace_jax.rl.methods import MethodConfig
from trace_jax.rl.trainer import state_shardings
from trace_jax.rollout import SamplingConfig, save_trajectories
from trace_jax.runs import Checkpoints, MetricsWriter, Progress, RunFolder, RunFolderError, read_metrics
from trace_jax.runs.files import write_atomically
from trace_jax.tasks import Split, TaskConfig, make_task

# What `init_from` calls the model that comes with a package.
SMOLLM2 = "smollm2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run.

    `init_from` is the run folder of a warm start, a Hugging Face folder (its `config.json` is the model, see
    `with_checkpoint`), `smollm2` for that model's weights, None for random ones.
    """

    name: str
    root: str = "runs"
    seed: int = 0
    init_from: str | None = None
    model: ModelConfig
    method: MethodConfig
    task: TaskConfig
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    rl: RLConfig = dataclasses.field(default_factory=RLConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    def __post_init__(self):
        check_range("", self, "seed", at_least=0, below=2**32)  # JAX's keys tell no more apart


def with_vocabulary(model: ModelConfig, task_config: TaskConfig) -> ModelConfig:
    """The model with the task's vocabulary; an explicit vocabulary must hold it.

    Raises:
        ConfigError: the configured vocabulary is smaller than the tokenizer's.
    """
    needed = make_task(task_config).tokenizer.vocab_size
    if model.vocab_size == 0:
        return dataclasses.replace(model, vocab_size=needed)
    if model.vocab_size < needed:
        raise ConfigError(
            f"model.vocab_size is {model.vocab_size}, but the tokenizer of task {task_config.name!r} has {needed} ids."
        )
    return model


def own_tokenizer(init_from: str | None) -> str | None:
    """Name of the tokenizer that a checkpoint's ids are of: a folder's own, or that of a run's task; else None."""
    if init_from is None or init_from == SMOLLM2:
        return init_from
    if (Path(init_from) / "tokenizer.json").is_file():
        return init_from
    run = RunFolder(Path(init_from))
    return run.config().get("task", {}).get("tokenizer") if run.config_path.is_file() else None


def with_checkpoint(config: RunConfig) -> RunConfig:
    """A run that starts from a Hugging Face folder gets that folder's model; `dtype` and `remat` stay its own.

    Raises:
        CheckpointFormatError: a `config.json` that is not of a known family, or not honoured.
        ConfigError: the weights come with a tokenizer, and the task uses another.
    """
    check_own_tokenizer(own_tokenizer(config.init_from), config.task.tokenizer, key="task.tokenizer")
    if not is_hf_folder(config.init_from):
        return config
    return dataclasses.replace(config, model=run_like(read_model_config(config.init_from)[2], config.model))


def load_params(
    folder: str | Path, model: ModelConfig, step: int | None = None, *, mesh: jax.sharding.Mesh | None = None
) -> nnx.State:
    """FP32 masters of a run, a Hugging Face folder or `smollm2`.

    Args:
        folder: of a warm start or an RL run, whose latest checkpoint is taken unless there is a `step`; of a Hugging
            Face checkpoint; or `smollm2`, which comes from its package, upcycled where the model has experts.
        model: what the parameters have to fit.
        mesh: where a Hugging Face checkpoint is laid out, each process reading its own part; None is one device.

    Raises:
        FileNotFoundError: the folder has no checkpoint, or SmolLM2's package is not installed.
        CheckpointError, CheckpointFormatError: it is damaged or of another model.
        ConfigError: the model is not SmolLM2's, nor one that it can be upcycled to.
    """
    if folder == SMOLLM2:
        return load_llama(smollm2_file(), model)
    if is_hf_folder(folder):
        loaded = load_model(folder, mesh=mesh)
        check_same_model(loaded.config, model, str(folder))
        return loaded.params
    checkpoints = Checkpoints(RunFolder(Path(folder)).checkpoints_path)
    template = {"train": {"params": abstract(model, jax.devices()[0])[1]}}
    restored = checkpoints.restore(template, step, partial=True)
    if restored is None:
        raise FileNotFoundError(f"{folder} has no checkpoint; run the warm start or the training first.")
    return restored.state["train"]["params"]


@functools.lru_cache(maxsize=4)
def graph_definition(model: ModelConfig) -> nnx.GraphDef:
    """The static half of a model. Cached, so that equal configs share jitted functions."""
    return abstract(model)[0]


def make_loop(config: RunConfig) -> Loop:
    """The loop of a config; runs that differ in seed only may share it, and with it every compiled function."""
    model = with_vocabulary(config.model, config.task)
    return Loop(
        graphdef=graph_definition(model),
        model=model,
        method=config.method,
        config=config.rl,
        optimizer=config.optimizer,
        task=make_task(config.task),
        prompt_length=config.task.max_prompt_tokens,
    )


def train(config: RunConfig, *, loop: Loop | None = None, progress: Progress | None = None) -> Run:
    """Runs, or resumes, `config.root/config.name` to `config.rl.steps`.

    A resumed run repeats the steps after its last checkpoint and gives the same metrics as an uninterrupted one. With a
    constant learning rate a finished run goes on when it is given more steps.
    """
    # Everything that can refuse the config comes before the folder, which then belongs to it.
    loop, mesh = loop or make_loop(config), make_mesh(config.mesh)
    task = loop.task
    encode_prompt(task, task.sample(0))
    if config.rl.evaluate_every:
        make_task(config.task, "eval")
    # A schedule that ends with the run would not be the one that the run began with.
    may_change = ("root", "rl.steps") if config.optimizer.schedule == "constant" else ("root",)
    folder = RunFolder.open(
        config.root,
        config.name,
        to_mapping(config),
        primary=jax.process_index() == 0,
        may_change=may_change,
    )
    iterator = prompt_iterator(task, config.rl.prompts, seed=config.seed)
    with (
        jax.set_mesh(mesh),
        Checkpoints(folder.checkpoints_path, keep=config.rl.keep_checkpoints) as checkpoints,
    ):
        latest = checkpoints.latest_step()
        if latest is not None and latest > config.rl.steps:
            raise ConfigError(
                f"rl.steps is {config.rl.steps}, but {folder.path} has already made {latest} steps."
            )
        # A checkpoint holds everything: what the run started from is needed no more.
        start(loop, config if latest is None else dataclasses.replace(config, init_from=None), mesh)
        if latest is not None:
            restored = checkpoints.restore(loop.template(latest))
            loop.restore(restored.state, restored.extra["loop"])
            iterator.set_state(restored.extra["iterator"])
        progress = progress or Progress(config.rl.steps, start=loop.step, title=config.name)
        with progress, MetricsWriter(folder, start_step=loop.step) as writer:
            while loop.step < config.rl.steps:
                _one_step(loop, iterator, config, folder, writer, checkpoints, progress)
    rows = read_metrics(folder.metrics_path)
    return Run(method=label(config.method, config.rl), seed=config.seed, rows=rows, planned=config.rl.steps)


def label(method: MethodConfig, rl: RLConfig) -> str:
    """Name of a method in tables: guided weights are a switch of their own, of FP4 trainers."""
    return method.name + ("+weights" if rl.guide_weights and method.trainer != "bf16" else "")


def start(loop: Loop, config: RunConfig, mesh: jax.sharding.Mesh) -> None:
    """Gives a loop its first parameters, laid out on the mesh."""
    model = loop.model
    if config.init_from:
        params = load_params(config.init_from, model, mesh=mesh)
    else:
        _, params = create(model, jax.random.key(config.seed))
    # Also on one device: a state whose leaves disagree about their sharding would compile the train step twice.
    loop.start(shard(params, mesh, logical_axes(params)), config.seed)
    loop.train = jax.device_put(loop.train, state_shardings(model, loop.train, mesh))


def _one_step(loop, iterator, config: RunConfig, folder: RunFolder, writer, checkpoints, progress) -> None:
    step = loop.step
    batch = next(iterator)
    metrics = loop.run_step(batch["prompts"], batch["problems"])
    every = config.rl.save_trajectories_every
    if every and step % every == 0:
        save_trajectories(folder.path / "trajectories" / f"{step:06d}.npz", loop.trajectories)
    every = config.rl.evaluate_every
    if every and loop.step % every == 0:
        precision = config.method.format if config.method.rollout == "fp4" else "bf16"
        scores = score_policy(loop.train.params, config, precision, count=config.rl.evaluation_prompts)
        metrics["eval/score"] = float(scores.mean())
    writer.write(step, metrics)
    progress.update(loop.step, metrics)
    if loop.step % config.rl.checkpoint_every == 0 or loop.step == config.rl.steps:
        checkpoints.save(loop.step, loop.arrays(), {"loop": loop.values(), "iterator": iterator.get_state()})


@functools.lru_cache(maxsize=8)
def _evaluator(
    model: ModelConfig, task_json: str, split: Split, precision: str, max_new_tokens: int, temperature: float
) -> Evaluator:
    task_config = from_mapping(TaskConfig, json.loads(task_json))
    task = make_task(task_config, split)
    return Evaluator(
        graph_definition(model),
        model,
        task,
        precision=precision,
        sampling=SamplingConfig(
            temperature=temperature, max_new_tokens=max_new_tokens, stop_tokens=task.tokenizer.eos_ids
        ),
        prompt_length=task_config.max_prompt_tokens,
    )


def score_policy(
    params: nnx.State,
    config: RunConfig,
    precision: str,
    *,
    split: Split = "eval",
    count: int | None = None,
    temperature: float = 0.0,
) -> np.ndarray:
    """Scores of a policy at a precision, one response to a problem.

    Args:
        params: FP32 masters.
        config: of the run: model, task, response length.
        precision: `bf16`, `nvfp4`, `nvfp4_4over6` or `mxfp4`.
        split: held-out problems, or those of training.
        count: how many problems, starting over when there are fewer; all of the split by default.
        temperature: 0 is greedy.
    """
    model = with_vocabulary(config.model, config.task)
    task_json = json.dumps(to_mapping(config.task))
    evaluator = _evaluator(model, task_json, split, precision, config.rl.max_new_tokens, temperature)
    task = evaluator.task
    problems = [task.sample(i % len(task)) for i in range(count or len(task))]
    return evaluator.score(params, problems, seed=config.seed)


def add_score(folder: Path, name: str, score: float) -> None:
    """Keeps a final score in the run's `scores.json`."""
    path = folder / "scores.json"
    scores = json.loads(path.read_text()) if path.exists() else {}
    write_atomically(path, (json.dumps(scores | {name: score}, indent=1) + "\n").encode())


def read_run(folder: str | Path) -> tuple[RunConfig, Run]:
    """Config and metrics of a finished or unfinished run, with the scores that `experiments.evaluate` added.

    Raises:
        RunFolderError: the folder is none, or that of a warm start.
        ReportError: the run has no complete step yet.
    """
    run_folder = RunFolder(Path(folder))
    stored = run_folder.config()
    if "warmstart" in stored:
        raise RunFolderError(
            f"{folder} is a warm start, not an RL run; expected a run of experiments.train or compare."
        )
    config = from_mapping(RunConfig, stored)
    scores_path = run_folder.path / "scores.json"
    try:
        scores: dict[str, Any] = json.loads(scores_path.read_text()) if scores_path.exists() else {}
    except ValueError as error:
        raise RunFolderError(f"{scores_path} is not JSON ({error}); delete it and evaluate again.") from error
    if not run_folder.metrics_path.exists():
        raise RunFolderError(f"{folder} has no metrics.jsonl: the run has not made a step yet.")
    rows = read_metrics(run_folder.metrics_path)
    return config, Run(
        method=label(config.method, config.rl),
        seed=config.seed,
        rows=rows,
        planned=config.rl.steps,
        scores=scores,
    )
