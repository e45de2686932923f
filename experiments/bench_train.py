"""What guidance costs in the train step: every method beside plain QAT, in interleaved pairs.

    python -m experiments.bench_train
    python -m experiments.bench_train model=moe_30m rl.prompts=64 pairs=40

Each method trains on a rollout of the same weights with its own record: same prompts, same routing replay, no audit, no
control pass. Every timed step starts from the same state, with its record already on the device, as in the RL loop,
which sends it while rewards are scored and the record is checked. A second set of rows times all of that: from the end
of the rollout to the new state.
"""

import functools
from collections.abc import Callable

import hydra
import jax
import jax.numpy as jnp
import numpy as np
from omegaconf import DictConfig

from experiments.bench import BenchConfig, Subject, advantages, default_config
from experiments.common import CONFIGS, enable_compilation_cache, script
from experiments.pairs import seconds, time_pairs, write_benchmark
from trace_jax.config import from_mapping
from trace_jax.rl.batch import make_batch, send_rows


class TrainStep:
    """Prepares one optimiser step of a method and returns it: state and batch on the device, the result awaited."""

    def __init__(self, subject: Subject):
        loop = subject.loop
        self.trainer, self.state, self.trajectories = loop.trainer, loop.train, subject.rollout()
        self.check = functools.partial(
            make_batch,
            self.trajectories,
            advantages(subject.config),
            model=loop.model,
            spec=loop.spec,
            weight_version=loop.version,
            replay_routes=subject.config.rl.replay_routes,
        )
        self.batch = self.check()
        self.normalizer = np.float32(self.batch.sampled.sum())
        self.score = functools.partial(loop.rewards, subject.problems, self.trajectories)

    def __call__(self) -> Callable[[], None]:
        state = jax.tree.map(jnp.copy, self.state)  # a step donates it
        batch = self.batch.to_device()
        jax.block_until_ready((state, batch))
        return lambda: jax.block_until_ready(self.trainer.step(state, batch, self.normalizer))

    def after_rollout(self) -> Callable[[], None]:
        """Prepares what follows a rollout in the RL loop: the record's copy under scoring and checks, the step."""
        state = jax.tree.map(jnp.copy, self.state)
        jax.block_until_ready(state)

        def run():
            sent = send_rows(self.batch.packed)
            self.score()
            batch = self.check().to_device(sent)
            jax.block_until_ready(self.trainer.step(state, batch, self.normalizer))

        return run

    def overlapped(self, repeats: int = 10) -> dict[str, float]:
        """The record's MB, and median ms: its copy to the device, and what the host does meanwhile."""
        packed = self.batch.packed

        def ms(run):
            return round(1e3 * float(np.median([seconds(run) for _ in range(repeats)])), 2)

        return {
            "record, MB": round(0.0 if packed is None else packed.data.nbytes / 1e6, 2),
            "copy, ms": ms(lambda: jax.block_until_ready(send_rows(packed))),
            "scoring, ms": ms(self.score),
            "checking, ms": ms(self.check),
        }


@hydra.main(config_path=CONFIGS, config_name=default_config(), version_base="1.3")
@script
def main(config: DictConfig) -> None:
    bench = from_mapping(BenchConfig, config)
    enable_compilation_cache(bench.out)
    subject = Subject(bench, bench.baseline)
    sizes, baseline = subject.sizes(), TrainStep(subject)
    steps = {method: TrainStep(Subject(bench, method)) for method in bench.methods}
    targets = {method: bench.target(method, "train") for method in bench.methods}
    results = time_pairs(steps, baseline, pairs=bench.pairs, targets=targets)
    whole = {method: step.after_rollout for method, step in steps.items()}
    whole = time_pairs(whole, baseline.after_rollout, pairs=bench.pairs, targets=targets)
    results |= {f"{method}, from the end of the rollout": ratio for method, ratio in whole.items()}
    sizes["overlapped"] = {method: step.overlapped() for method, step in steps.items()}
    text = write_benchmark(
        "bench_train", results, bench, baseline=bench.baseline, what="train step", sizes=sizes
    )
    print(text)


if __name__ == "__main__":
    main()
