"""A task of one's own from a JSON Lines file."""

import dataclasses
import json

from trace_jax.data import ByteTokenizer, JsonlSource, Problem, Row
from trace_jax.tasks.base import Split, TaskError, in_split
from trace_jax.tasks.scoring import make_scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlConfig:
    """Where the problems are, what their fields are called and how answers are scored.

    Attributes:
      path: the file of training problems.
      eval_path: the file of held-out problems. None holds out a share of `path` by a hash of the prompt.
      eval_share: that share.
      prompt, answer: names of the fields; the answer is text or a number. `answer` may be None for a callable score.
      worked: name of the field with a model answer for warm starts; None takes the answer.
      metadata: names of fields of any type that `score` finds in the problem's metadata.
      score: `exact`, `number`, `math`, or a callable's dotted name, see `scoring.make_scorer`.
    """

    path: str
    eval_path: str | None = None
    eval_share: float = 0.1
    prompt: str = "prompt"
    answer: str | None = "answer"
    worked: str | None = None
    metadata: tuple[str, ...] = ()
    score: str = "exact"

    def __post_init__(self):
        if not 0 < self.eval_share < 1:
            raise ValueError(f"eval_share is {self.eval_share}; expected between 0 and 1")


class JsonlTask:
    """The rows of a split in the order of the file, at most `size` of them; text is tokenized as UTF-8 bytes.

    Raises:
      TaskError: an unknown score, an answer that it cannot compare with, an empty split, or a problem in both files.
      DataError: a line that is not as configured; the message has its number.
      FileNotFoundError: no such file.
    """

    name = "jsonl"

    def __init__(self, config: JsonlConfig, *, split: Split, size: int, max_prompt_tokens: int):
        self.config = config
        self.max_prompt_tokens = max_prompt_tokens
        self.tokenizer = ByteTokenizer()
        self._scorer = make_scorer(config.score)
        if config.answer is None and self._scorer.check is not None:
            raise TaskError(
                f"score {config.score!r} compares with an answer; name its field in task.params.answer"
            )
        self._rows = self._split(split)[:size]
        if not self._rows:
            raise TaskError(
                f"{config.path} has no {split} problem: add rows, change eval_share, or set eval_path"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, index: int) -> Problem:
        """The problem of this index; its metadata has the line of the file, too.

        Raises:
          IndexError: outside the task.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of a task of {len(self)}")
        config, row = self.config, self._rows[index]
        answer = self._answer(row)
        return Problem(
            prompt=row.fields[config.prompt],
            answer=answer,
            worked=answer if config.worked is None else row.fields[config.worked],
            metadata={"line": row.line} | {name: row.fields[name] for name in config.metadata},
        )

    def score(self, completion: str, problem: Problem) -> float:
        """The configured score; a finite number, also from a callable."""
        return self._scorer.score(completion, problem)

    def _split(self, split: Split) -> list[Row]:
        config = self.config
        rows = self._read(config.path)
        if config.eval_path is None:
            return [row for row in rows if in_split(row.fields[config.prompt], split, config.eval_share)]
        held_out = self._read(config.eval_path)
        trained = {row.fields[config.prompt]: row.line for row in rows}
        for row in held_out:
            prompt = row.fields[config.prompt]
            if prompt in trained:
                raise TaskError(
                    f"line {row.line} of {config.eval_path} is line {trained[prompt]} of {config.path}, too: "
                    f"{prompt!r}. Held-out problems must not be trained on"
                )
        return rows if split == "train" else held_out

    def _read(self, path: str) -> list[Row]:
        config = self.config
        fields = dict.fromkeys(config.metadata, (object,)) | {config.prompt: (str,)}
        if config.answer is not None:
            fields[config.answer] = (str, int, float)
        if config.worked is not None:
            fields[config.worked] = (str,)
        rows = list(JsonlSource(path, fields))
        for row in rows:
            if not row.fields[config.prompt].strip():
                raise TaskError(f"{path}, line {row.line}: {config.prompt!r} is blank")
            if self._scorer.check is not None:
                try:
                    self._scorer.check(self._answer(row))
                except ValueError as error:
                    raise TaskError(
                        f"{path}, line {row.line}: score {config.score!r} cannot use the answer: {error}"
                    ) from error
        return rows

    def _answer(self, row: Row) -> str | None:
        if self.config.answer is None:
            return None
        answer = row.fields[self.config.answer]
        return answer if isinstance(answer, str) else json.dumps(answer)
