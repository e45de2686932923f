"""What recording guidance costs in the rollout, and what the engine reaches at each precision.

    python -m experiments.bench_rollout
    python -m experiments.bench_rollout model=moe_30m rl.prompts=64 pairs=20
    python -m experiments.bench_rollout what=decode model=qwen3_30b_a3b 'throughput.contexts=[8192]'
    python -m experiments.bench_rollout what=lengths model=smollm2_moe

`what=recording`: every method beside plain QAT's rollout, in interleaved pairs. Same weights, prompts and keys, so the
same tokens; no stop tokens, so every sequence has full length; no audit. The time includes the record's way to the
host.

`what=decode`: tokens a second over a full cache, at each precision's largest batch or at one batch for all
(`throughput.batch`). `what=profile`: the kernels of its steps, on a GPU. `what=lengths`: continuous against static
batches of responses of very different lengths. `what=record`: recording long responses in the engine beside not
recording them. Runs with the same `out` make one table. Large caches need a process each, and
XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.
"""

import dataclasses
from pathlib import Path

import hydra
from omegaconf import DictConfig

from experiments.bench import BenchConfig, Subject, default_config
from experiments.common import CONFIGS, enable_compilation_cache, script
from experiments.pairs import time_pairs, write_benchmark
from experiments.throughput import WHAT, ThroughputConfig, measure
from trace_jax.config import ConfigError, from_mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutBenchConfig(BenchConfig):
    """`what` is timed: `recording`, or what `throughput` configures."""

    what: str = "recording"
    throughput: ThroughputConfig

    def __post_init__(self):
        super().__post_init__()
        if self.what not in (allowed := ("recording", *WHAT)):
            raise ConfigError(f"what is {self.what!r}; expected one of {allowed}.")


@hydra.main(config_path=CONFIGS, config_name=default_config("bench_rollout"), version_base="1.3")
@script
def main(config: DictConfig) -> None:
    bench = from_mapping(RolloutBenchConfig, config)
    enable_compilation_cache(bench.out)
    if bench.what != "recording":
        print(measure(bench.what, bench.throughput, bench.model, bench.seed, Path(bench.out)))
        return
    baseline = Subject(bench, bench.baseline)
    rollouts = {method: Subject(bench, method) for method in bench.methods}
    targets = {method: bench.target(method, "rollout") for method in bench.methods}
    results = time_pairs(
        {method: lambda subject=subject: subject.rollout for method, subject in rollouts.items()},
        lambda: baseline.rollout,
        pairs=bench.pairs,
        targets=targets,
    )
    text = write_benchmark(
        "bench_rollout", results, bench, baseline=bench.baseline, what="rollout", sizes=baseline.sizes()
    )
    print(text)


if __name__ == "__main__":
    main()
