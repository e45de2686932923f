"""What recording guidance costs in the rollout: every method beside plain QAT's rollout, in interleaved pairs.

    python -m experiments.bench_rollout
    python -m experiments.bench_rollout model=moe_30m rl.prompts=64 pairs=20

Same weights, prompts and keys, so the same tokens; no stop tokens, so every sequence has full length; no audit. The
time includes the record's way to the host.
"""

import hydra
from omegaconf import DictConfig

from experiments.bench import BenchConfig, Subject, default_config
from experiments.common import CONFIGS, enable_compilation_cache, script
from experiments.pairs import time_pairs, write_benchmark
from trace_jax.config import from_mapping


@hydra.main(config_path=CONFIGS, config_name=default_config(), version_base="1.3")
@script
def main(config: DictConfig) -> None:
    bench = from_mapping(BenchConfig, config)
    enable_compilation_cache(bench.out)
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
