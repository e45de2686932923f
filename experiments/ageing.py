"""How guidance ages: the log-prob gap after 1, 4 and 16 optimiser steps on one batch of rollouts.

    python -m experiments.ageing init_from=runs/compare/warmstart seeds=3

Arms: `bf16`; `qat` and `trace_all_layers`, each with and without guided weights. Writes `runs/<name>/summary.json` and
`summary.md`.
"""

import dataclasses
import json
from pathlib import Path

import hydra
from omegaconf import DictConfig

from experiments.common import CONFIGS, enable_compilation_cache, method_config, script
from trace_jax.config import from_mapping
from trace_jax.models import ModelConfig
from trace_jax.rl import OptimizerConfig, RLConfig
from trace_jax.rl.ageing import age_rollout, ageing_table
from trace_jax.rl.run import RunConfig, load_params, make_loop
from trace_jax.runs import describe_environment
from trace_jax.tasks import TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgeingConfig:
    """`ages` are optimiser steps since the rollout; `init_from` the run folder whose weights are rolled out."""

    name: str
    root: str
    init_from: str
    seeds: int
    ages: tuple[int, ...]
    methods: tuple[str, ...]
    model: ModelConfig
    task: TaskConfig
    rl: RLConfig
    optimizer: OptimizerConfig

    def __post_init__(self):
        if self.seeds < 1 or list(self.ages) != sorted(set(self.ages)) or not self.ages or self.ages[0] < 0:
            raise ValueError(
                f"seeds is {self.seeds}, ages {self.ages}; expected at least one seed and increasing ages from 0 on."
            )


@hydra.main(config_path=CONFIGS, config_name="ageing", version_base="1.3")
@script
def main(config: DictConfig) -> None:
    ageing = from_mapping(AgeingConfig, config)
    enable_compilation_cache(ageing.root)
    arms = {}
    for method in ageing.methods:
        for guide_weights in (False, True):
            if guide_weights and method_config(method).trainer == "bf16":
                continue
            run = RunConfig(
                name="ageing",
                model=ageing.model,
                task=ageing.task,
                method=method_config(method),
                rl=dataclasses.replace(ageing.rl, guide_weights=guide_weights, audit_sequences=0),
                optimizer=ageing.optimizer,
            )
            loop = make_loop(run)
            params = load_params(ageing.init_from, loop.model)
            arm = method + ("+weights" if guide_weights else "")
            arms[arm] = [
                row for seed in range(ageing.seeds) for row in age_rollout(loop, params, seed, ageing.ages)
            ]
            print(f"{arm}: gap {arms[arm][-1].gap:.4g} after {arms[arm][-1].age} steps", flush=True)
    folder = Path(ageing.root) / ageing.name
    folder.mkdir(parents=True, exist_ok=True)
    table = ageing_table(arms)
    rows = {arm: [dataclasses.asdict(row) for row in values] for arm, values in arms.items()}
    (folder / "summary.json").write_text(
        json.dumps({"arms": rows, "environment": describe_environment()}, indent=1) + "\n"
    )
    (folder / "summary.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
