"""Sampling and the log-probs of the distribution that was sampled."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.config import ConfigError, check_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """`temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole distribution.

    A response ends after one of `stop_tokens` or `max_new_tokens` tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 32
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self):
        check_range("", self, "temperature", at_least=0)  # 0 is greedy
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; expected 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; expected a share in (0, 1].")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1.")

    def check_for_training(self) -> None:
        """Raises ValueError for settings whose log-probs the trainer cannot reproduce."""
        if self.temperature == 0 or self.top_k or self.top_p < 1:
            raise ConfigError(
                f"training needs the full distribution: temperature {self.temperature}, top_k {self.top_k}, top_p "
                f"{self.top_p}. Use temperature > 0, top_k=0, top_p=1; truncated sampling is for evaluation."
            )


def scale_logits(logits: Float[Array, "*rows V"], temperature: float) -> Float[Array, "*rows V"]:
    """Logits of the sampled distribution; rollout and trainer share it so that their log-probs compare."""
    return logits if temperature in (0, 1) else logits * (1.0 / temperature)


def sample(
    logits: Float[Array, "B V"], keys: Array, config: SamplingConfig
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One token per sequence with its own key, and the token's log-prob under the truncated, tempered distribution."""
    if config.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1)
        return tokens.astype(jnp.int32), jnp.zeros(tokens.shape, logits.dtype)
    scaled = _truncate(scale_logits(logits, config.temperature), config)
    tokens = jax.vmap(jax.random.categorical)(keys, scaled)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(scaled, axis=-1), tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), logprobs


def _truncate(logits, config: SamplingConfig):
    if config.top_k:
        kth = jax.lax.top_k(logits, min(config.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if config.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        # The smallest set whose mass reaches top_p: a token stays if the mass before it is below top_p.
        inside = jnp.cumsum(probabilities, axis=-1) - probabilities < config.top_p
        smallest = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return logits


def token_logprobs(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], temperature: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob of each token given the tokens before it (0 at position 0), and the entropy that it was drawn from."""
    logprobs = jax.nn.log_softmax(scale_logits(logits[:, :-1], temperature), axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy))
