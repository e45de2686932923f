"""Score of a run's policy at a precision, on held-out problems.

    python -m experiments.evaluate run=runs/demo/bf16_0 precision=nvfp4

Precisions: bf16, nvfp4, nvfp4_4over6, mxfp4. The score is kept in the run's `scores.json`.
"""

import dataclasses
import json
from pathlib import Path

import hydra
from omegaconf import DictConfig

from experiments.common import CONFIGS, enable_compilation_cache, script
from trace_jax.config import check_range, from_mapping
from trace_jax.rl.run import add_score, load_params, read_run, score_policy, with_vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """`checkpoint` None takes the latest, `problems` 0 all held-out problems, `temperature` 0 is greedy."""

    run: str
    precision: str = "nvfp4"
    checkpoint: int | None = None
    problems: int = 0
    temperature: float = 0.0

    def __post_init__(self):
        check_range("", self, "problems", "temperature", at_least=0)


@hydra.main(config_path=CONFIGS, config_name="evaluate", version_base="1.3")
@script
def main(config: DictConfig) -> None:
    evaluate = from_mapping(EvaluateConfig, config)
    run_config, _ = read_run(evaluate.run)
    enable_compilation_cache(run_config.root)
    params = load_params(
        evaluate.run, with_vocabulary(run_config.model, run_config.task), evaluate.checkpoint
    )
    scores = score_policy(
        params,
        run_config,
        evaluate.precision,
        count=evaluate.problems or None,
        temperature=evaluate.temperature,
    )
    result = {
        "run": evaluate.run,
        "precision": evaluate.precision,
        "score": scores.mean(),
        "problems": len(scores),
    }
    if evaluate.checkpoint is None and not evaluate.problems and not evaluate.temperature:
        add_score(Path(evaluate.run), f"held_out_{evaluate.precision}", float(scores.mean()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
