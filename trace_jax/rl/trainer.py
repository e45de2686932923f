"""Jitted training: guided QAT forward, GRPO loss, optimiser step, weight sync."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trace_jax.alignment.metrics import logprob_mismatch
from trace_jax.guidance import GuidanceSpec
from trace_jax.models import ModelConfig, abstract, logical_axes
from trace_jax.parallel import sharding
from trace_jax.quant import Numerics, guides_of
from trace_jax.rl.batch import TrainBatch, constrain_batch, replayed_routes
from trace_jax.rl.config import RLConfig
from trace_jax.rl.losses import policy_loss
from trace_jax.rollout import token_logprobs


class NonFiniteError(FloatingPointError):
    """A parameter holds NaN or Inf."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """FP32 masters and optimiser state; replaced, never changed in place."""

    params: Any
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardResult:
    """A trainer forward: log-probs and entropy `[B, S]`, and what the sites reported.

    `counts` by guided layer, `audit` by layer (see `quant.numerics`); `route_agreement` is the share of replayed routes
    that this model's own router would also have chosen, None without replay.
    """

    logprobs: Any
    entropy: Any
    counts: Any
    audit: Any
    route_agreement: Any


class Trainer:
    """Training side of one method. Holds only static things; parameters and records are arguments."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        model: ModelConfig,
        config: RLConfig,
        optimizer: optax.GradientTransformation,
        *,
        numerics: Numerics,
        spec: GuidanceSpec | None,
    ):
        self.graphdef, self.model, self.config = graphdef, model, config
        self.optimizer, self.numerics, self.spec = optimizer, numerics, spec

    def init(self, params: nnx.State) -> TrainState:
        return TrainState(params=params, opt_state=self.optimizer.init(params))

    def forward(
        self, params: nnx.State, batch: TrainBatch, weight_guides: dict[str, Any] | None
    ) -> ForwardResult:
        """Log-probs of the batch's tokens under its record. Pure; traced inside the jitted steps."""
        model = nnx.merge(self.graphdef, params)
        batch = constrain_batch(batch)
        positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), batch.tokens.shape)
        routes = replayed_routes(batch.routes)
        out = model(
            batch.tokens,
            positions,
            batch.fed,
            numerics=self.numerics,
            routes=routes,
            guides=guides_of(batch.sites),
            weight_guides=weight_guides,
            guided_layers=self.spec.layers if batch.sites else (),
        )
        logprobs, entropy = token_logprobs(model.logits(out.hidden), batch.tokens, self.config.temperature)
        agreement = None
        if routes is not None:
            known = routes >= 0
            same = jnp.any(out.routes[..., :, None] == routes[..., None, :], axis=-1) & known
            agreement = jnp.sum(same) / jnp.maximum(jnp.sum(known), 1)
        return ForwardResult(
            logprobs=logprobs, entropy=entropy, counts=out.guided, audit=out.every, route_agreement=agreement
        )

    @functools.partial(jax.jit, static_argnums=0)
    def evaluate(self, params, batch: TrainBatch, weight_guides=None) -> tuple[dict[str, Any], ForwardResult]:
        """Forward only: the mismatch to the rollout, and the full result (old log-probs, control pass)."""
        result = self.forward(params, batch, weight_guides)
        return logprob_mismatch(result.logprobs, batch.rollout_logprobs, batch.sampled), result

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(
        self,
        state: TrainState,
        batch: TrainBatch,
        normalizer: jax.Array,
        old_logprobs: jax.Array | None = None,
        reference_logprobs: jax.Array | None = None,
        weight_guides: dict[str, Any] | None = None,
    ) -> tuple[TrainState, dict[str, Any], ForwardResult]:
        """One (micro)batch: gradients of the guided loss, optimiser update.

        Args:
            normalizer: tokens that the loss is divided by (float32 scalar).
            old_logprobs: for `ratio="decoupled"`.
            reference_logprobs: for a KL term.

        Returns:
            New state, scalar metrics, and the forward's report.
        """

        def loss_fn(params):
            result = self.forward(params, batch, weight_guides)
            loss, sums = policy_loss(
                result.logprobs,
                result.entropy,
                rollout=batch.rollout_logprobs,
                old=old_logprobs,
                reference=reference_logprobs,
                advantages=batch.advantages,
                mask=batch.sampled,
                normalizer=normalizer,
                config=self.config,
            )
            return loss, (result, sums)

        (loss, (result, sums)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        tokens = jnp.maximum(jnp.sum(batch.sampled), 1)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
            "tokens": tokens,
            "policy/clipped_share": sums["clipped"] / tokens,
            "is/clipped_share": sums["is_clipped"] / tokens,
            "policy/entropy": sums["entropy"] / tokens,
        }
        if result.route_agreement is not None:
            metrics["router/agreement"] = result.route_agreement
        if "kl" in sums:
            metrics["policy/kl_reference"] = sums["kl"] / tokens
        mismatch = logprob_mismatch(result.logprobs, batch.rollout_logprobs, batch.sampled)
        metrics |= {f"mismatch/{name}": value for name, value in mismatch.items()}
        return TrainState(params=params, opt_state=opt_state), metrics, result


@jax.jit
def _finite(tree):
    return jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), tree)


def check_finite(params: nnx.State) -> None:
    """Raises NonFiniteError that names the first parameter with NaN or Inf."""
    flags = jax.device_get(_finite(params))
    bad = [path for path, ok in jax.tree_util.tree_leaves_with_path(flags) if not ok]
    if bad:
        names = [".".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path[:-1]) for path in bad]
        raise NonFiniteError(
            f"parameter {names[0]!r} holds NaN or Inf ({len(bad)} of {len(jax.tree.leaves(flags))} parameters do); "
            "nothing was saved after the last good checkpoint. Lower the learning rate or restart from it."
        )


def state_shardings(model: ModelConfig, state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
    """Shardings of a train state: optimiser moments lie like the parameters they belong to, scalars are replicated."""
    axes = {
        _path(path): names
        for path, names in jax.tree_util.tree_leaves_with_path(
            logical_axes(abstract(model)[1]), is_leaf=lambda a: isinstance(a, tuple)
        )
    }

    def place(path, leaf):
        for start in range(len(path)):
            names = axes.get(_path(path[start:]))
            if names is not None and len(names) == np.ndim(leaf):
                return sharding(mesh, names, np.shape(leaf))
        return sharding(mesh, (), ())

    return jax.tree_util.tree_map_with_path(place, state)


def _path(path) -> tuple[str, ...]:
    names = (str(getattr(k, "key", getattr(k, "name", k))) for k in path)
    return tuple(name for name in names if name != "value")
