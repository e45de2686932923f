"""One RL run, resumable.

    python -m experiments.train name=my_run method=trace_all_layers init_from=runs/warmstart rl.steps=100

Starts `runs/<name>/`, or resumes it from its last checkpoint. `init_from` may also be a Hugging Face folder, whose
`config.json` is then the model. A sweep:

    python -m experiments.train -m method=qat,trace seed=0,1,2 'name=${method.name}_${seed}'
"""

import hydra
from omegaconf import DictConfig

from experiments.common import CONFIGS, enable_compilation_cache, script
from trace_jax.config import from_mapping
from trace_jax.rl.run import RunConfig, train, with_checkpoint


@hydra.main(config_path=CONFIGS, config_name="train", version_base="1.3")
@script
def main(config: DictConfig) -> None:
    run_config = with_checkpoint(from_mapping(RunConfig, config))
    enable_compilation_cache(run_config.root)
    train(run_config)


if __name__ == "__main__":
    main()
