"""What the two benchmarks share: one set of weights, prompts and keys, and each method's loop on them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.common import method_config
from trace_jax.data import prompt_iterator
from trace_jax.models import ModelConfig, create
from trace_jax.models.transformer import parameter_count
from trace_jax.parallel import MeshConfig
from trace_jax.rl import OptimizerConfig, RLConfig
from trace_jax.rl.loop import Loop
from trace_jax.rl.run import RunConfig, load_params, make_loop
from trace_jax.rollout import Sampler, Trajectories
from trace_jax.tasks import TaskConfig


def default_config(name: str = "bench") -> str:
    """Config `name` on an accelerator, `<name>_cpu` (a model and batch that two cores can time) without one."""
    return f"{name}_cpu" if jax.default_backend() == "cpu" else name


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """`pairs` timed pairs of each of `methods` with `baseline`; JSON and table go to `out`.

    `init_from` is the run folder of a warm start; None takes random weights. `targets` hold the largest allowed ratio
    of a guided method, by benchmark.
    """

    out: str
    pairs: int
    methods: tuple[str, ...]
    baseline: str
    targets: dict[str, float]
    init_from: str | None = None
    seed: int = 0
    model: ModelConfig
    task: TaskConfig
    mesh: MeshConfig
    rl: RLConfig
    optimizer: OptimizerConfig

    def __post_init__(self):
        if self.pairs < 2:
            raise ValueError(f"pairs is {self.pairs}; expected at least 2, or there is no interval.")
        if self.rl.audit_sequences or self.rl.control_every:
            raise ValueError("a benchmark measures neither audit nor control: set both to 0 under rl.")

    def target(self, method: str, benchmark: str) -> float | None:
        """Only guidance is promised a bound; other methods are shown for comparison."""
        return self.targets[benchmark] if method_config(method).trainer == "guided" else None


class Subject:
    """One method at work: rollouts of fixed length (no stop tokens), and train batches made of them."""

    def __init__(self, config: BenchConfig, method: str):
        run = RunConfig(
            name=method,
            seed=config.seed,
            model=config.model,
            method=method_config(method),
            task=config.task,
            mesh=config.mesh,
            rl=config.rl,
            optimizer=config.optimizer,
        )
        self.config = config
        self.loop: Loop = make_loop(run)
        stopping = self.loop.sampler
        self.sampler = Sampler(
            stopping.graphdef,
            stopping.model,
            stopping.rollout,
            dataclasses.replace(stopping.sampling, stop_tokens=()),
            plan=stopping.plan,
            record=stopping.record,
        )
        self.loop.start(initial_params(config, self.loop.model), config.seed)
        drawn = next(prompt_iterator(self.loop.task, config.rl.prompts, seed=config.seed))
        self.prompts, self.problems = drawn["prompts"], drawn["problems"]
        self.keys = jax.random.split(jax.random.key(config.seed), config.rl.sequences)

    def rollout(self) -> Trajectories:
        """A rollout, with its record on the host."""
        weights = self.loop.history[self.loop.version]
        return self.sampler.generate(weights, self.prompts, self.keys, weight_version=self.loop.version)

    def sizes(self) -> dict[str, Any]:
        rl = self.config.rl
        return {
            "parameters": parameter_count(self.loop.train.params),
            "layers": self.loop.model.num_layers,
            "experts": self.loop.model.num_experts,
            "sequences": rl.sequences,
            "prompt tokens (bucket)": self.sampler.rollout.prompt_length,
            "new tokens": rl.max_new_tokens,
        }


def initial_params(config: BenchConfig, model: ModelConfig) -> nnx.State:
    """The same masters for every method, in buffers of their own: a train step donates them."""
    if config.init_from:
        return load_params(config.init_from, model)
    return jax.tree.map(jnp.copy, create(model, jax.random.key(config.seed))[1])


def advantages(config: BenchConfig) -> np.ndarray:
    """Any numbers with the statistics of group-normalised advantages."""
    return np.random.default_rng(config.seed).standard_normal(config.rl.sequences).astype(np.float32)
