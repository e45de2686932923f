"""Any task as a chat: every prompt is a user's message in the tokenizer's chat template."""

import dataclasses
import datetime
from typing import Any

from trace_jax.data import HfTokenizer, Problem
from trace_jax.tasks.base import Task, TaskError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """The conversation around a prompt.

    Attributes:
      system: the system message; None leaves it to the template.
      date: the day, YYYY-MM-DD, for templates that print one. Fixed, so that prompts do not change from day to day.
      variables: what else the template takes, such as `{"enable_thinking": false}`.
    """

    system: str | None = None
    date: str = "2025-01-01"
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        datetime.date.fromisoformat(self.date)  # its ValueError names the text


def conversation(tokenizer: HfTokenizer, text: str, config: ChatConfig) -> str:
    """A user's message in the tokenizer's chat template, up to where the assistant answers.

    Raises:
      TokenizerError: the template refuses the conversation, or takes no such variable.
    """
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    messages = [*system, {"role": "user", "content": text}]
    date = datetime.date.fromisoformat(config.date)
    return tokenizer.chat(messages, date=date, variables=config.variables)


class ChatTask:
    """A task whose prompts are conversations; problems and scores are the task's own.

    Raises:
      TaskError: the task's tokenizer has no chat template.
    """

    def __init__(self, task: Task, config: ChatConfig):
        if not isinstance(task.tokenizer, HfTokenizer):
            raise TaskError(
                f"task.chat needs a tokenizer with a chat template; that of task {task.name!r} is "
                f"{type(task.tokenizer).__name__}: set task.tokenizer to smollm2 or to a model's folder"
            )
        self.name = task.name
        self.tokenizer = task.tokenizer
        self.max_prompt_tokens = task.max_prompt_tokens
        self._task = task
        self._config = config

    def __len__(self) -> int:
        return len(self._task)

    def sample(self, index: int) -> Problem:
        """The task's problem, its prompt up to where the assistant answers.

        Raises:
          TokenizerError: the template refuses the conversation, or takes no such variable.
        """
        problem = self._task.sample(index)
        return dataclasses.replace(problem, prompt=conversation(self.tokenizer, problem.prompt, self._config))

    def score(self, completion: str, problem: Problem) -> float:
        return self._task.score(completion, problem)
