"""Routers of all families: which experts a token goes to, and with which weights."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.config import ConfigError, check_range

SCORES = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How experts are scored, chosen and weighted.

    Args:
        scores: gates are a softmax of the logits, or a sigmoid of each.
        normalize: gates of the chosen experts sum to one (times `scale`). For a softmax that is the softmax over the
            chosen experts' logits alone.
        groups: experts are in this many groups of neighbours, and only those in the `top_groups` with the highest sum
            of two scores can be chosen (DeepSeek-V3, arXiv 2412.19437).
        top_groups: see `groups`.
        scale: factor of the gates.
        bias: the logits have a bias, a part of scores and gates alike.
        correction: scores have a bias per expert for the choice alone, which balances load (arXiv 2408.15664).
    """

    scores: str = "softmax"
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    bias: bool = False
    correction: bool = False

    def __post_init__(self):
        if self.scores not in SCORES:
            raise ConfigError(f"model.router.scores is {self.scores!r}; expected one of {SCORES}.")
        check_range("model.router", self, "groups", "top_groups", at_least=1)
        check_range("model.router", self, "scale", above=0)
        if self.top_groups > self.groups:
            raise ConfigError(
                f"model.router.top_groups is {self.top_groups}; expected at most groups, {self.groups}."
            )
        if self.scores == "softmax" and (self.groups > 1 or self.correction):
            raise ConfigError(
                f"model.router has scores 'softmax' with groups {self.groups} and correction {self.correction}; "
                "expected scores 'sigmoid', for which they are defined."
            )

    def check(self, num_experts: int, experts_per_token: int) -> None:
        """Raises ConfigError unless that many experts can be grouped, and that many of them chosen."""
        if self.groups == 1:
            return
        if num_experts % self.groups or num_experts < 2 * self.groups:
            raise ConfigError(
                f"model.router.groups is {self.groups} of {num_experts} experts; expected a divisor that leaves at "
                "least two experts in a group."
            )
        reachable = self.top_groups * num_experts // self.groups
        if experts_per_token > reachable:
            raise ConfigError(
                f"model.experts_per_token is {experts_per_token}, but the {self.top_groups} groups that are kept have "
                f"{reachable} experts; raise model.router.top_groups."
            )


def route(
    logits: Float[Array, "B T E"],
    k: int,
    replay: Int[Array, "B T k"] | None,
    config: RouterConfig,
    correction: Float[Array, " E"] | None = None,
) -> tuple[Int[Array, "B T k"], Int[Array, "B T k"], Float[Array, "B T k"]]:
    """Chooses k experts per token, or replays recorded ones (R3).

    Gates are always those of this model's own logits at the experts that are used. Gradients flow through the gates,
    not through the choice.

    Args:
        logits: FP32 or wider, a bias included.
        k: experts per token.
        replay: recorded experts; negative where there is none: such a token chooses for itself.
        config: of the family.
        correction: bias of the choice, exactly where `config.correction`.

    Returns:
        This model's own choice, the choice that is used (both int32), and the gates of the latter.
    """
    if (correction is not None) != config.correction:
        raise ValueError(
            f"correction is {'missing' if correction is None else 'given'}, but router.correction is "
            f"{config.correction}; pass one exactly where the config has one."
        )
    own_experts = _choose(jax.lax.stop_gradient(logits), k, config, correction)
    experts = own_experts if replay is None else jnp.where(replay >= 0, replay, own_experts)
    if config.scores == "softmax" and not config.normalize:
        gates = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), experts, axis=-1)
    elif config.scores == "softmax":
        gates = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
    else:
        gates = jax.nn.sigmoid(jnp.take_along_axis(logits, experts, axis=-1))
        if config.normalize:
            gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)  # sigmoids of -100 are all 0
    return own_experts, experts, gates if config.scale == 1.0 else gates * config.scale


def _choose(logits: jax.Array, k: int, config: RouterConfig, correction: jax.Array | None) -> jax.Array:
    if config.scores == "softmax":  # in the order of the logits
        return jax.lax.top_k(logits, k)[1]
    scores = jax.nn.sigmoid(logits)
    if correction is not None:
        scores = scores + jax.lax.stop_gradient(correction).astype(scores.dtype).reshape(1, 1, -1)
    if config.groups > 1:
        grouped = scores.reshape(*scores.shape[:-1], config.groups, -1)
        best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        kept = jax.lax.top_k(best, config.top_groups)[1]
        keep = jnp.any(kept[..., None] == jnp.arange(config.groups).reshape(1, 1, 1, -1), axis=-2)
        # Not 0 in the place of the others: corrections may be negative, and they must not be chosen then either.
        scores = jnp.where(keep[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, k)[1]
