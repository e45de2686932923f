"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), scaled by YaRN (Peng et al. 2023, arXiv 2309.00071)."""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas.dots import accumulator_dtype
from trace_jax.config import ConfigError, check_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN: pairs that turn rarely within the original context are slowed down by `factor`, fast ones are kept.

    Args:
        factor: how many times longer the context becomes.
        original_length: context of the pretraining, in tokens.
        beta_fast, beta_slow: a pair with more than `beta_fast` turns in the original context keeps its frequency, one
            with fewer than `beta_slow` is slowed down fully, in between the two are mixed linearly.
        truncate: the ends of that range are rounded outwards to whole pairs.
        attention_factor: multiplies cos and sin, hence scores by its square; None: from `mscale` and
            `mscale_all_dim` where both are given, otherwise 0.1 ln(factor) + 1 as in the paper.
        mscale, mscale_all_dim: DeepSeek's way to scale scores (arXiv 2405.04434), 0 where not given: cos and sin take
            the ratio of the two, and the rest is `score_scale`, a factor of the softmax scale.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self):
        section = "model.rope.scaling"
        check_range(section, self, "factor", "original_length", at_least=1)
        check_range(section, self, "beta_fast", "beta_slow", above=0)
        check_range(section, self, "mscale", "mscale_all_dim", at_least=0)
        if self.attention_factor is not None:
            check_range(section, self, "attention_factor", above=0)
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"{section}.beta_fast is {self.beta_fast}; expected more turns than beta_slow, {self.beta_slow}."
            )

    @property
    def rotation_scale(self) -> float:
        """Factor of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_scale(self) -> float:
        """Factor of the softmax scale, for attention whose heads are rotated in part only (MLA)."""
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding.

    Args:
        theta: base of the frequencies, theta^(-2i / dim) radians a token for pair i.
        dim: how many leading dimensions of a head are rotated; None: all of them.
        interleaved: pair i is dimensions (2i, 2i + 1), not (i, i + dim / 2).
        scaling: extends the context; None: as pretrained.
    """

    theta: float = 10_000.0
    dim: int | None = None
    interleaved: bool = False
    scaling: YarnConfig | None = None

    def __post_init__(self):
        check_range("model.rope", self, "theta", above=1)
        if self.dim is not None and (self.dim < 2 or self.dim % 2):
            raise ConfigError(f"model.rope.dim is {self.dim}; RoPE rotates pairs: expected an even size.")

    @property
    def score_scale(self) -> float:
        """Factor of the softmax scale that comes with `scaling`; 1 unless it states `mscale_all_dim`."""
        return 1.0 if self.scaling is None else self.scaling.score_scale

    def frequencies(self, dim: int, dtype: DTypeLike) -> Float[Array, " pairs"]:
        """Radians a token of each of the dim / 2 pairs."""
        half = dim // 2
        pair = jnp.arange(half, dtype=dtype)
        frequency = self.theta ** (-pair / half)
        if self.scaling is None:
            return frequency
        slow, fast = self._mixed_pairs(dim)
        slowed = jnp.clip((pair - fast) / (slow - fast), 0, 1)
        return frequency * (1 - slowed) + frequency / self.scaling.factor * slowed

    def _mixed_pairs(self, dim: int) -> tuple[float, float]:
        """Pairs, as real numbers, between which frequencies are mixed: the slow end and the fast end."""

        def pair(turns):
            # Pair i turns original_length * theta^(-2i / dim) / 2 pi times in the original context.
            per_turn = self.scaling.original_length / (turns * 2 * math.pi)
            return dim * math.log(per_turn) / (2 * math.log(self.theta))

        fast, slow = pair(self.scaling.beta_fast), pair(self.scaling.beta_slow)
        if self.scaling.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(float(fast), 0.0), min(float(slow), dim - 1.0)
        return (slow if slow != fast else fast + 1e-3), fast


def rope(
    x: Float[Array, "B T heads d"], positions: Int[Array, "B T"], config: RopeConfig
) -> Float[Array, "B T heads d"]:
    """Rotates pairs of dimensions by position times frequency, in FP32 or wider.

    Raises:
        ValueError: `config.dim` exceeds d, or d is odd where all of it is rotated.
    """
    dim = x.shape[-1] if config.dim is None else config.dim
    if dim > x.shape[-1] or dim % 2:
        raise ValueError(
            f"cannot rotate {dim} dimensions of heads of {x.shape[-1]}; expected an even number, at most all: "
            "set model.rope.dim"
        )
    half = dim // 2
    acc = accumulator_dtype(x.dtype)
    angle = positions.astype(acc)[..., None, None] * config.frequencies(dim, acc).reshape(1, 1, 1, half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    if config.scaling is not None:
        sin, cos = sin * config.scaling.rotation_scale, cos * config.scaling.rotation_scale
    if config.interleaved:
        first, second = slice(0, dim, 2), slice(1, dim, 2)
    else:
        first, second = slice(0, half), slice(half, dim)
    a, b = x[..., first].astype(acc), x[..., second].astype(acc)
    turned = [a * cos - b * sin, b * cos + a * sin]
    if config.interleaved:
        turned = [jnp.stack(turned, axis=-1).reshape(*x.shape[:-1], dim)]
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), x[..., dim:]], axis=-1)
