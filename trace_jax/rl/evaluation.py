"""Score of a policy at a precision."""

from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from trace_jax.config import ConfigError
from trace_jax.data import decode_response, encode_prompt
from trace_jax.models import ModelConfig
from trace_jax.quant import QuantPlan, rollout_weights
from trace_jax.rollout import RolloutConfig, Sampler, SamplingConfig
from trace_jax.tasks import Problem, Task

PRECISIONS = {
    "bf16": None,
    "nvfp4": QuantPlan(format="nvfp4"),
    "nvfp4_4over6": QuantPlan(format="nvfp4", scale_rule="4over6"),
    "mxfp4": QuantPlan(format="mxfp4"),
}


def precision_plan(precision: str) -> QuantPlan | None:
    """FP4 plan of a precision's name; ValueError with the allowed names otherwise."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}; expected one of {sorted(PRECISIONS)}.")
    return PRECISIONS[precision]


class Evaluator:
    """Samples one response to each problem and scores it, with the rollout's own arithmetic."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        model: ModelConfig,
        task: Task,
        *,
        precision: str,
        sampling: SamplingConfig,
        prompt_length: int,
        batch: int = 64,
    ):
        self.task, self.model, self.plan = task, model, precision_plan(precision)
        rollout = RolloutConfig(num_prompts=batch, group_size=1, prompt_length=prompt_length)
        self.sampler = Sampler(graphdef, model, rollout, sampling, plan=self.plan)
        self._weights = jax.jit(rollout_weights, static_argnums=(1, 2))

    def score(self, params: nnx.State, problems: Sequence[Problem], *, seed: int = 0) -> np.ndarray:
        """float64 `[len(problems)]`, scores of FP32 masters `params` at this precision.

        Raises:
            ValueError: there are no problems.
        """
        prompts = [encode_prompt(self.task, problem) for problem in problems]
        keys = jax.random.split(jax.random.key(seed), max(len(prompts), 1))
        weights = self._weights(params, self.plan, self.model.dtype)
        trajectories = self.sampler.generate(weights, prompts, keys, weight_version=0)
        texts = [decode_response(self.task.tokenizer, trajectories.response(n)) for n in range(len(problems))]
        return np.asarray(
            [self.task.score(text, p) for text, p in zip(texts, problems, strict=True)], np.float64
        )
