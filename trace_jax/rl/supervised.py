"""Supervised warm start on worked answers, so that RL begins with signal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from trace_jax.config import check_range
from trace_jax.models import ModelConfig
from trace_jax.quant import Bf16Numerics
from trace_jax.rl.trainer import TrainState
from trace_jax.rollout import token_logprobs


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """`steps` batches of `batch` sequences of `length` tokens, from the first `problems` of the task's training split.

    RL may train on fewer of them (`task.train_size`).
    """

    problems: int = 65536
    steps: int = 300
    batch: int = 128
    length: int = 48
    learning_rate: float = 3e-3

    def __post_init__(self):
        check_range("warmstart", self, "problems", "steps", "batch", at_least=1)
        check_range("warmstart", self, "length", at_least=2)  # a token to predict, and one before it
        check_range("warmstart", self, "learning_rate", above=0.0)

    def optimizer(self) -> optax.GradientTransformation:
        warmup = max(self.steps // 10, 1)
        schedule = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, warmup, self.steps + 1)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))


class SupervisedTrainer:
    """BF16 next-token training on masked tokens."""

    def __init__(self, graphdef: nnx.GraphDef, model: ModelConfig, config: SupervisedConfig):
        self.graphdef, self.model, self.optimizer = graphdef, model, config.optimizer()

    def init(self, params: nnx.State) -> TrainState:
        return TrainState(params=params, opt_state=self.optimizer.init(params))

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(
        self, state: TrainState, tokens: Int[Array, "B S"], loss_mask: Bool[Array, "B S"]
    ) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
        """One optimiser step; `loss_mask` marks the tokens to be predicted. Returns the loss in nats per token."""

        def loss_fn(params):
            model = nnx.merge(self.graphdef, params)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            # Padding follows the text, so causal attention never reaches it from a token in the loss.
            valid = jnp.ones(tokens.shape, bool)
            out = model(tokens, positions, valid, numerics=Bf16Numerics())
            logprobs, _ = token_logprobs(model.logits(out.hidden), tokens, 1.0)
            return -jnp.sum(jnp.where(loss_mask, logprobs, 0.0)) / jnp.maximum(jnp.sum(loss_mask), 1)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return TrainState(params=params, opt_state=opt_state), metrics
