"""Sampling and the log-probs of the distribution that was sampled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.config import ConfigError, check_range

MAX_STOP_TOKENS = 8
"""Stop tokens of a request: they are compared on the device, in an array of this width."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How one request is sampled.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 keep the whole distribution. `min_p` drops tokens less
    likely than that share of the likeliest (Nguyen et al. 2024, arXiv 2407.01082). A response ends after one of
    `stop_tokens`, after the token that completes one of `stop_strings`, or after `max_new_tokens` tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 32
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        check_range("", self, "temperature", at_least=0)  # 0 is greedy
        check_range("", self, "min_p", at_least=0, below=1)
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; expected 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; expected a share in (0, 1].")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1.")
        if len(self.stop_tokens) > MAX_STOP_TOKENS:
            raise ConfigError(
                f"stop_tokens are {len(self.stop_tokens)}; expected at most {MAX_STOP_TOKENS}. Use stop_strings for "
                "more."
            )
        if "" in self.stop_strings:
            raise ConfigError("stop_strings hold an empty string, which would stop every response at once.")

    @property
    def truncated(self) -> bool:
        """Whether tokens are left out of the distribution."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == 1 and not self.truncated

    @property
    def inverse_temperature(self) -> float:
        """What logits are multiplied by; 0 says greedy."""
        return 1 / self.temperature if self.temperature else 0.0

    def check_for_training(self) -> None:
        """Raises ConfigError for settings whose log-probs the trainer cannot reproduce."""
        if self.temperature == 0 or self.truncated:
            raise ConfigError(
                f"training needs the full distribution: temperature {self.temperature}, top_k {self.top_k}, top_p "
                f"{self.top_p}, min_p {self.min_p}. Use temperature > 0, top_k=0, top_p=1, min_p=0; truncated sampling "
                "is for evaluation."
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Draws:
    """How the sequences of a batch are sampled, `[B]` each: fields as in `SamplingConfig`, and a PRNG key each.

    `inverse_temperature` is float32, 0 where the sequence is greedy; `top_k` int32; `top_p` and `min_p` float32.
    """

    inverse_temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    keys: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """One token per sequence, int32 `[B]`; its log-prob float32 where it was drawn, and by the model's own logits."""

    tokens: Any
    logprobs: Any
    raw_logprobs: Any


def scale_logits(logits: Float[Array, "*rows V"], temperature: float) -> Float[Array, "*rows V"]:
    """Logits of the sampled distribution; rollout and trainer share it so that their log-probs compare."""
    return logits if temperature in (0, 1) else logits * (1.0 / temperature)


def sample(logits: Float[Array, "B V"], draws: Draws, *, plain: bool) -> Sampled:
    """One token per sequence with its own key.

    Greedy tokens have log-prob 0. `plain`, static, says that every temperature is 1 and nothing is truncated: then the
    two log-probs are the same, and half the passes over the logits are saved.
    """
    if plain:
        tokens = jax.vmap(jax.random.categorical)(draws.keys, logits)
        logprobs = _of(jax.nn.log_softmax(logits, axis=-1), tokens)
        return Sampled(tokens=tokens.astype(jnp.int32), logprobs=logprobs, raw_logprobs=logprobs)
    greedy = draws.inverse_temperature == 0
    scaled = logits * jnp.where(greedy, 1, draws.inverse_temperature)[:, None]
    scaled = jax.lax.cond(
        jnp.any((draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0)),
        lambda scaled: _truncate(scaled, draws),
        lambda scaled: scaled,
        scaled,
    )
    drawn = jax.vmap(jax.random.categorical)(draws.keys, scaled)
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn)
    return Sampled(
        tokens=tokens.astype(jnp.int32),
        logprobs=jnp.where(greedy, 0, _of(jax.nn.log_softmax(scaled, axis=-1), tokens)),
        raw_logprobs=_of(jax.nn.log_softmax(logits, axis=-1), tokens),
    )


def _of(logprobs: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def _truncate(logits, draws: Draws):
    """Logits with -inf for what is left out: by `top_k`, by `top_p` of what that leaves, by `min_p`."""
    size = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    kth = jnp.where(draws.top_k > 0, jnp.minimum(draws.top_k, size), size)
    lowest = jnp.take_along_axis(ordered, kth[:, None] - 1, axis=-1)
    kept = jnp.where(ordered < lowest, -jnp.inf, ordered)
    probabilities = jax.nn.softmax(kept, axis=-1)
    # The smallest set whose mass reaches top_p: a token stays if the mass before it is below top_p.
    inside = jnp.cumsum(probabilities, axis=-1) - probabilities < draws.top_p[:, None]
    inside |= (draws.top_p >= 1)[:, None]
    lowest = jnp.maximum(lowest, jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True))
    share = jnp.where(draws.min_p > 0, jnp.log(draws.min_p), -jnp.inf)
    lowest = jnp.maximum(lowest, ordered[:, :1] + share[:, None])
    return jnp.where(logits < lowest, -jnp.inf, logits)


def token_logprobs(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], temperature: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob of each token given the tokens before it (0 at position 0), and the entropy that it was drawn from."""
    logprobs = jax.nn.log_softmax(scale_logits(logits[:, :-1], temperature), axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy))
