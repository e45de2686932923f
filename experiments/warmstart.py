"""Supervised warm start of a model on a task's worked answers.

    python -m experiments.warmstart name=warmstart warmstart.steps=150

RL runs start from it with `init_from=runs/warmstart`.
"""

import hydra
from omegaconf import DictConfig

from experiments.common import CONFIGS, enable_compilation_cache, script
from trace_jax.config import from_mapping
from trace_jax.rl.warmstart import WarmStartConfig, warm_start


@hydra.main(config_path=CONFIGS, config_name="warmstart", version_base="1.3")
@script
def main(config: DictConfig) -> None:
    warm_config = from_mapping(WarmStartConfig, config)
    enable_compilation_cache(warm_config.root)
    warm_start(warm_config)


if __name__ == "__main__":
    main()
