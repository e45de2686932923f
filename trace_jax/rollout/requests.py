"""What an engine is asked for, and what it gives back."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt8, UInt32

from trace_jax.rollout.sampling import SamplingConfig

Finish = Literal["stop", "length", "cancelled", "ended"]
"""Why a sequence ended: a stop token or string, its limit, `Engine.cancel`, or `Engine.end` of a sequence of turns."""


DecodeText = Callable[[list[int]], str]
"""Text of token ids: what stop strings are looked for in."""


class RequestError(ValueError):
    """A request that the engine cannot serve; the message says what to change."""


class NoRoomError(RequestError):
    """An observation that leaves its sequence no room for a response."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Responses to one prompt, which is computed once for all of them.

    Attributes:
        prompt: token ids.
        sampling: `max_new_tokens` counts the tokens of one turn.
        seeds: one for each response; or their PRNG keys, uint32 `[responses, words]` as of `jax.random.key_data`.
        turns: the sequence waits after its response for `Engine.extend` or `Engine.end`.
        max_length: tokens of a sequence of turns at most; by default what prompt and one response may have.
        audit: for each response, whether the full codes of its rows are kept; none by default.
        rows: where the rows of each response are put, uint8 `[S, Engine.row_bytes]`, those past its end blank; by
            default new memory.
    """

    prompt: Any
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    seeds: Any = (0,)
    turns: bool = False
    max_length: int | None = None
    audit: tuple[bool, ...] | None = None
    rows: tuple[UInt8[np.ndarray, "..."], ...] | None = None

    def __post_init__(self):
        if len(self.prompt) == 0:
            raise RequestError(
                "the prompt is empty; give it at least one token, such as the tokenizer's first."
            )
        if len(self.seeds) == 0:
            raise RequestError("a request without seeds asks for no response; give one seed for each.")
        for name in ("audit", "rows"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.seeds):
                raise RequestError(f"{name} has {len(value)} entries for {len(self.seeds)} responses.")
        if self.max_length is not None and self.max_length <= len(self.prompt):
            raise RequestError(
                f"max_length is {self.max_length}, but the prompt alone has {len(self.prompt)} tokens."
            )

    @property
    def length(self) -> int:
        """Tokens of one of its sequences at most."""
        return self.max_length or len(self.prompt) + self.sampling.max_new_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """One sequence, on the host, once all of its rows are; or, `finish` None, at the end of a turn, without them.

    Invariants:
        * `tokens` int32 `[length]`: prompt, responses and, between turns, observations. The first `prompt_length` are
          the prompt. `sampled` marks those that the policy drew.
        * `logprobs`, `raw_logprobs` float32 `[length]`: of the distribution that was sampled and of the model's own, 0
          where a token was not sampled.
        * `rows` uint8 `[length - 1, bytes]`: packed rows (`Engine.layout`) of all tokens but the last, which is never
          fed; `versions` int32 `[length - 1]`: of the weights that computed each; `audit` rows likewise, or None.
    """

    id: int
    tokens: Int32[np.ndarray, " length"]
    prompt_length: int
    sampled: Bool[np.ndarray, " length"]
    logprobs: Float32[np.ndarray, " length"]
    raw_logprobs: Float32[np.ndarray, " length"]
    finish: Finish | None
    versions: Int32[np.ndarray, " fed"] | None = None
    rows: UInt8[np.ndarray, "fed bytes"] | None = None
    audit: UInt8[np.ndarray, "fed audit_bytes"] | None = None

    @property
    def turn(self) -> Int32[np.ndarray, " turn"]:
        """Tokens of the last response."""
        observed = np.flatnonzero(~self.sampled)[-1] + 1
        return self.tokens[observed:]


def key_words(seeds: Any) -> UInt32[np.ndarray, "responses words"]:
    """PRNG key data of seeds, or of what already is key data."""
    if isinstance(seeds, np.ndarray) and seeds.ndim == 2:
        return seeds.astype(np.uint32, copy=False)
    return np.stack([np.asarray(jax.random.key_data(jax.random.key(seed))) for seed in seeds])
