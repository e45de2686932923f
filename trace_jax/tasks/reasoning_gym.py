"""Any task of reasoning-gym by name, scored by its own scorer (the optional extra `reasoning`)."""

import difflib
import hashlib
from collections.abc import Mapping
from typing import Any

from trace_jax.data.problem import Problem
from trace_jax.data.tokenizer import ByteTokenizer
from trace_jax.tasks.base import Split, TaskError, in_split

# Half of an endless generator costs nothing, and each split needs two draws a problem on average.
_EVAL_SHARE = 0.5
_MAX_DRAWS = 200
_UNBOUNDED = 2**31
_POOL = 10_000


class ReasoningGymTask:
    """Problems of one reasoning-gym dataset; text is tokenized as UTF-8 bytes, since tasks use many symbols.

    Args:
      dataset: reasoning-gym's name of the task, such as "chain_sum".
      params: its own difficulty options, such as {"max_terms": 3}.
      prompt_suffix: what follows the question.

    Raises:
      TaskError: reasoning-gym is not installed, knows no such task, or refuses the options.
    """

    def __init__(
        self,
        dataset: str,
        params: Mapping[str, Any],
        *,
        split: Split,
        size: int,
        seed: int,
        max_prompt_tokens: int,
        prompt_suffix: str = "\n",
    ):
        self.name = f"reasoning_gym/{dataset}"
        self.split = split
        self.size = size
        self.seed = seed
        self.max_prompt_tokens = max_prompt_tokens
        self.prompt_suffix = prompt_suffix
        self.tokenizer = ByteTokenizer()
        # Problem i of a dataset is a function of seed + i; the run's seed enters through the index instead.
        self._dataset = _create(dataset, params, size=_POOL)
        try:
            self._dataset[_UNBOUNDED - 1]
            self._pool = _UNBOUNDED
        except IndexError:  # a few tasks draw their problems from a list made at construction
            self._pool = _POOL

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Problem:
        """The problem of this index: the first draw of its own random stream whose question lies in the split.

        Raises:
          IndexError: outside the task.
          TaskError: the dataset has so few questions that the split is empty.
        """
        if not 0 <= index < self.size:
            raise IndexError(f"problem {index} of a task of {self.size}")
        for draw in range(_MAX_DRAWS):
            digest = hashlib.sha256(f"{self.seed}/{self.split}/{index}/{draw}".encode()).digest()
            entry = self._dataset[int.from_bytes(digest[:8], "big") % self._pool]
            if in_split(entry["question"], self.split, _EVAL_SHARE):
                answer = entry["answer"]
                return Problem(
                    prompt=entry["question"] + self.prompt_suffix,
                    answer=answer,
                    worked=answer,
                    metadata=entry,
                )
        raise TaskError(
            f"{self.name} has no question for split {self.split!r} among {_MAX_DRAWS} draws: widen its options"
        )

    def score(self, completion: str, problem: Problem) -> float:
        """The dataset's own score of the stripped completion; many tasks give partial credit."""
        return float(self._dataset.score_answer(answer=completion.strip(), entry=dict(problem.metadata)))


def _create(dataset: str, params: Mapping[str, Any], size: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise TaskError(
            f"task 'reasoning_gym' needs the package reasoning-gym, which is not installed ({error}): "
            "pip install 'trace-jax[reasoning]'"
        ) from error
    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS, n=3)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise TaskError(
            f"reasoning-gym has no task {dataset!r}.{hint} Its tasks: {', '.join(sorted(DATASETS))}"
        )
    try:
        return create_dataset(dataset, size=size, seed=0, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise TaskError(
            f"reasoning-gym task {dataset!r} refused the options {dict(params)}: {error}"
        ) from error
