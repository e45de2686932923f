"""GRPO token loss and the corrections for a rollout policy that is not the trainer's."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from trace_jax.rl.config import RLConfig

# exp() of a larger log-ratio would overflow; verl bounds it likewise.
LOG_RATIO_BOUND = 20.0


def ratio_of(log_ratio: Float[Array, "B S"]) -> Float[Array, "B S"]:
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def correction_weight(
    old: Float[Array, "B S"], rollout: Float[Array, "B S"], mask: Bool[Array, "B S"], config: RLConfig
) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """Stopped importance weight of old (trainer) over rollout policy, per token, and where the correction bounds it.

    `tis`: truncated importance sampling (Yao et al. 2025, Flash-RL). `icepop`: double-sided mask (Ling team 2025).
    `sequence_mask`: sequences with geometric-mean weight outside the interval are dropped.
    """
    log_weight = lax.stop_gradient(jnp.where(mask, old - rollout, 0.0))
    weight = ratio_of(log_weight)
    if config.correction == "none":
        return jnp.ones_like(weight), jnp.zeros_like(mask)
    if config.correction == "tis":
        return jnp.minimum(weight, config.tis_cap), weight > config.tis_cap
    if config.correction == "icepop":
        inside = (weight >= config.icepop_low) & (weight <= config.icepop_high)
        return jnp.where(inside, weight, 0.0), ~inside
    count = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    mean = ratio_of(jnp.sum(log_weight, axis=1, keepdims=True) / count)
    keep = (mean >= config.icepop_low) & (mean <= config.icepop_high)
    return jnp.broadcast_to(keep.astype(weight.dtype), weight.shape), jnp.broadcast_to(~keep, weight.shape)


def policy_loss(
    logprobs: Float[Array, "B S"],
    entropy: Float[Array, "B S"],
    *,
    rollout: Float[Array, "B S"],
    old: Float[Array, "B S"] | None,
    reference: Float[Array, "B S"] | None,
    advantages: Float[Array, " B"],
    mask: Bool[Array, "B S"],
    normalizer: Float[Array, ""],
    config: RLConfig,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Clipped token-level policy loss, summed over sampled tokens and divided by `normalizer` (tokens).

    The clip is asymmetric (DAPO, Yu et al. 2025, arXiv 2503.14476). With `ratio="behaviour"` the ratio is trainer over
    rollout and `old` is unused; its upper bound `ratio_cap` also holds for negative advantages, where the clip alone
    would let it grow.

    Returns:
        Loss, and sums over tokens (divide by the token count): clipped, is_clipped, kl, entropy.
    """
    advantage = advantages[:, None]
    if config.ratio == "behaviour":
        ratio = ratio_of(jnp.where(mask, logprobs - rollout, 0.0))
        weight = jnp.ones_like(ratio)
        outside = ratio > config.ratio_cap
        ratio = jnp.minimum(ratio, config.ratio_cap)
    else:
        ratio = ratio_of(jnp.where(mask, logprobs - old, 0.0))
        weight, outside = correction_weight(old, rollout, mask, config)
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    objective = weight * jnp.minimum(ratio * advantage, clipped * advantage)
    per_token = -objective
    sums = {
        "clipped": jnp.sum(mask & (clipped * advantage < ratio * advantage)),
        "is_clipped": jnp.sum(mask & outside),
        "entropy": jnp.sum(jnp.where(mask, entropy, 0.0)),
    }
    if reference is not None:
        log_ratio = jnp.where(mask, reference - logprobs, 0.0)
        kl = ratio_of(log_ratio) - 1 - log_ratio  # k3 (Schulman 2020)
        per_token = per_token + config.kl_coefficient * kl
        sums["kl"] = jnp.sum(jnp.where(mask, kl, 0.0))
    per_token = per_token - config.entropy_coefficient * entropy
    return jnp.sum(jnp.where(mask, per_token, 0.0)) / normalizer, sums
