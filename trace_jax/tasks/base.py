"""The task protocol, and how problems are divided between training and evaluation."""

import hashlib
from typing import Literal, Protocol, runtime_checkable

from trace_jax.data.problem import Problem, ProblemSource

Split = Literal["train", "eval"]


class TaskError(ValueError):
    """A task that does not exist or cannot be built as asked; the message says what would work."""


@runtime_checkable
class Task(ProblemSource, Protocol):
    """A source of problems whose answers can be checked."""

    def score(self, completion: str, problem: Problem) -> float:
        """Reward in [0, 1] of the text that the policy wrote after the prompt, without special tokens."""
        ...


def in_split(identity: str, split: Split, eval_share: float) -> bool:
    """Whether the problem with this identity belongs to `split`.

    Membership is a hash of the problem itself, not of seed or index. So no run of any seed (a warm start, another
    arm of a comparison) can train on a problem of the evaluation split, however small the space of problems.
    """
    # A cryptographic hash: a checksum is linear in the digits, and the split would differ from training in kind.
    digest = hashlib.sha256(identity.encode()).digest()
    is_eval = int.from_bytes(digest[:8], "big") < eval_share * 2**64
    return is_eval == (split == "eval")
