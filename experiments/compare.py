"""Several methods and seeds from one warm start: one table, one set of figures.

    python -m experiments.compare seeds=3
    python -m experiments.compare experiment=demo

Writes `runs/<name>/`: `warmstart/`, one run folder per method and seed, `summary.json`, `summary.md`, `figures/*.png`.
A comparison that was interrupted continues where it stopped.
"""

import dataclasses
import shlex
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from experiments.common import CONFIGS, enable_compilation_cache, method_config, script
from trace_jax.alignment.comparison import group_by_method, write_report
from trace_jax.alignment.summary import Run
from trace_jax.config import from_mapping
from trace_jax.models import ModelConfig, logical_axes
from trace_jax.parallel import MeshConfig, make_mesh, shard
from trace_jax.rl import OptimizerConfig, RLConfig
from trace_jax.rl.evaluation import precision_plan
from trace_jax.rl.run import (
    RunConfig,
    add_score,
    label,
    load_params,
    make_loop,
    score_policy,
    train,
    with_vocabulary,
)
from trace_jax.rl.supervised import SupervisedConfig
from trace_jax.rl.warmstart import WarmStartConfig, warm_start
from trace_jax.runs import describe_environment
from trace_jax.tasks import TaskConfig, make_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """`seeds` runs of each method; every final policy is scored at each of `precisions`.

    `scored` responses on the problems of training, and one to each held-out problem.
    """

    name: str
    root: str
    seeds: int
    methods: tuple[str, ...]
    baseline: str
    yardstick: str
    precisions: tuple[str, ...]
    scored: int
    model: ModelConfig
    task: TaskConfig
    mesh: MeshConfig
    warmstart: SupervisedConfig
    rl: RLConfig
    optimizer: OptimizerConfig

    def __post_init__(self):
        if self.seeds < 1 or self.scored < 1 or not self.methods:
            raise ValueError(
                f"seeds is {self.seeds}, scored {self.scored} and methods {self.methods}; expected at least one."
            )


def scores_of(params, config: RunConfig, compare: "CompareConfig") -> dict[str, float]:
    """Sampled scores on the problems of training, as the reward sees them, and greedy ones on held-out problems."""
    scores = {}
    for precision in compare.precisions:
        sampled = score_policy(
            params,
            config,
            precision,
            split="train",
            count=compare.scored,
            temperature=config.rl.temperature,
        )
        scores[f"train_{precision}"] = float(sampled.mean())
        scores[f"held_out_{precision}"] = float(score_policy(params, config, precision).mean())
    return scores


def run_method(config: CompareConfig, method: str, folder: Path) -> list[Run]:
    """All seeds of one method; they share the loop and so every compiled function."""
    runs, loop = [], None
    for seed in range(config.seeds):
        run_config = RunConfig(
            name=f"{method}_{seed}",
            root=str(folder),
            seed=seed,
            init_from=str(folder / "warmstart"),
            model=config.model,
            method=method_config(method),
            task=config.task,
            mesh=config.mesh,
            rl=config.rl,
            optimizer=config.optimizer,
        )
        loop = loop or make_loop(run_config)
        run = train(run_config, loop=loop)
        scores = scores_of(loop.train.params, run_config, config)
        for precision, score in scores.items():
            add_score(folder / run_config.name, precision, score)
        runs.append(dataclasses.replace(run, scores=scores))
    return runs


@hydra.main(config_path=CONFIGS, config_name="compare", version_base="1.3")
@script
def main(config: DictConfig) -> None:
    compare = from_mapping(CompareConfig, config)
    folder = Path(compare.root) / compare.name
    enable_compilation_cache(compare.root)
    for method in (*compare.methods, compare.baseline, compare.yardstick):
        method_config(method)  # a misspelt name fails before anything is trained
    model = with_vocabulary(compare.model, compare.task)
    for precision in compare.precisions:
        if plan := precision_plan(precision):
            plan.check(**model.contractions)
    make_task(compare.task, "eval")
    warm = WarmStartConfig(
        name="warmstart",
        root=str(folder),
        model=compare.model,
        task=compare.task,
        warmstart=compare.warmstart,
    )
    warm_start(warm)
    runs = [run for method in compare.methods for run in run_method(compare, method, folder)]
    # Laid out like those of the runs, so that scoring does not compile again.
    params = load_params(folder / "warmstart", model)
    params = shard(params, make_mesh(compare.mesh), logical_axes(params))
    any_run = RunConfig(
        name="warmstart", model=compare.model, task=compare.task, method=method_config("bf16"), rl=compare.rl
    )
    notes = {
        "command": shlex.join(["python", "-m", "experiments.compare", *sys.argv[1:]]),
        "environment": describe_environment(),
        "warmstart_scores": scores_of(params, any_run, compare),
    }
    baseline, yardstick = (
        label(method_config(name), compare.rl) for name in (compare.baseline, compare.yardstick)
    )
    table = write_report(group_by_method(runs), folder, baseline=baseline, yardstick=yardstick, notes=notes)
    print(f"\n{table}\n\nScores of the warm start: {notes['warmstart_scores']}\nWritten to {folder}/")


if __name__ == "__main__":
    main()
