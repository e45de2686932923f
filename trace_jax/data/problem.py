"""What flows through the pipelines: problems, and anything that can be asked for one by index."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from trace_jax.data.tokenizer import Tokenizer


class DataError(ValueError):
    """A source or a problem that a pipeline cannot use; the message names it and the limit it breaks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem of a verifiable task.

    Attributes:
      prompt: what the policy is given.
      answer: the reference answer, or None where only the scorer knows what is right.
      worked: a model response that ends in the answer, for supervised warm starts; None if there is none.
      metadata: what the task's scorer needs.
    """

    prompt: str
    answer: str | None
    worked: str | None
    metadata: Mapping[str, Any]


@runtime_checkable
class ProblemSource(Protocol):
    """A finite sequence of problems: `sample(i)` is the same problem on every host and in every run."""

    name: str
    tokenizer: Tokenizer
    max_prompt_tokens: int

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Problem: ...
