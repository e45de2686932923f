"""What guidance costs in the train step: every method beside plain QAT, in interleaved pairs.

    python -m experiments.bench_train
    python -m experiments.bench_train model=moe_30m rl.prompts=64 pairs=40

Each method trains on a rollout of the same weights with its own record: same prompts, same routing replay, no audit, no
control pass. A step starts with its batch on the host, as in the RL loop, and ends when the new state is ready.
"""

from collections.abc import Callable

import hydra
import jax
import numpy as np
from omegaconf import DictConfig

from experiments.bench import BenchConfig, Subject, advantages, default_config
from experiments.common import CONFIGS, enable_compilation_cache, script
from experiments.pairs import time_pairs, write_benchmark
from trace_jax.config import from_mapping
from trace_jax.rl.batch import make_batch


def train_step(subject: Subject) -> Callable[[], None]:
    """A call that makes one optimiser step on one batch and waits for it."""
    loop = subject.loop
    batch = make_batch(
        subject.rollout(),
        advantages(subject.config),
        model=loop.model,
        spec=loop.spec,
        weight_version=loop.version,
        replay_routes=subject.config.rl.replay_routes,
    )
    normalizer = np.float32(batch.sampled.sum())

    def step():
        loop.train, *report = loop.trainer.step(loop.train, batch.to_device(), normalizer)
        jax.block_until_ready((loop.train, report))

    return step


@hydra.main(config_path=CONFIGS, config_name=default_config(), version_base="1.3")
@script
def main(config: DictConfig) -> None:
    bench = from_mapping(BenchConfig, config)
    enable_compilation_cache(bench.out)
    subject = Subject(bench, bench.baseline)
    sizes, baseline = subject.sizes(), train_step(subject)
    steps = {method: train_step(Subject(bench, method)) for method in bench.methods}
    targets = {method: bench.target(method, "train") for method in bench.methods}
    results = time_pairs(steps, baseline, pairs=bench.pairs, targets=targets)
    text = write_benchmark(
        "bench_train", results, bench, baseline=bench.baseline, what="train step", sizes=sizes
    )
    print(text)


if __name__ == "__main__":
    main()
