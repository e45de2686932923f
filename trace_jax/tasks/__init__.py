"""Verifiable tasks: problems by index, and a score for what the policy answered."""

import dataclasses
from typing import Any

from trace_jax.config import from_mapping
from trace_jax.data import Problem, load_tokenizer
from trace_jax.tasks.arithmetic import ArithmeticConfig, ArithmeticTask
from trace_jax.tasks.base import Split, Task, TaskError
from trace_jax.tasks.chat import ChatConfig, ChatTask, conversation
from trace_jax.tasks.jsonl import JsonlConfig, JsonlTask
from trace_jax.tasks.reasoning_gym import ReasoningGymTask

__all__ = [
    "ArithmeticConfig",
    "ArithmeticTask",
    "ChatConfig",
    "ChatTask",
    "JsonlConfig",
    "JsonlTask",
    "Problem",
    "ReasoningGymTask",
    "Split",
    "Task",
    "TaskConfig",
    "TaskError",
    "conversation",
    "make_task",
]

TASKS = ("arithmetic", "jsonl", "reasoning_gym/<task>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which problems a run trains and is evaluated on.

    Attributes:
      name: "arithmetic", "jsonl", or "reasoning_gym/<task>" such as "reasoning_gym/chain_sum".
      params: the task's own options: fields of ArithmeticConfig or JsonlConfig, or of reasoning-gym's config of it.
      train_size, eval_size: number of problems of each split; of a file, at most so many.
      seed: of the problems; the splits do not depend on it and never share a problem. A file has no use for it.
      max_prompt_tokens: longest prompt with its begin token; a longer one is an error, not cut.
      tokenizer: `bytes`, `smollm2`, or a folder with a `tokenizer.json`; None is the task's own.
      chat: puts prompts into the tokenizer's chat template; None leaves them as they are.
    """

    name: str = "arithmetic"
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_size: int = 65536
    eval_size: int = 256
    seed: int = 0
    max_prompt_tokens: int = 16
    tokenizer: str | None = None
    chat: ChatConfig | None = None

    def __post_init__(self):
        for field in ("train_size", "eval_size"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)}; expected at least 0")
        if self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens is {self.max_prompt_tokens}; expected at least 1")


def make_task(config: TaskConfig, split: Split = "train") -> Task:
    """The task of one split.

    Raises:
      TaskError: no such task, an empty split, or options that the task refuses.
      ConfigError: options of "arithmetic" or "jsonl" that do not exist or have the wrong type.
      TokenizerError, DataError, FileNotFoundError: a file that the config names is missing or not as it should be.
    """
    task = _make(config, split)
    if config.tokenizer is not None:
        task.tokenizer = load_tokenizer(config.tokenizer)
    return task if config.chat is None else ChatTask(task, config.chat)


def _make(config: TaskConfig, split: Split) -> Task:
    size = config.train_size if split == "train" else config.eval_size
    if size == 0:
        raise TaskError(f"task {config.name!r} is empty: {split}_size is 0, expected at least 1")
    common = {"split": split, "size": size, "max_prompt_tokens": config.max_prompt_tokens}
    kind, _, dataset = config.name.partition("/")
    if config.name == "arithmetic":
        options = from_mapping(ArithmeticConfig, config.params, prefix="task.params")
        return ArithmeticTask(options, seed=config.seed, **common)
    if config.name == "jsonl":
        return JsonlTask(from_mapping(JsonlConfig, config.params, prefix="task.params"), **common)
    if kind == "reasoning_gym" and dataset:
        return ReasoningGymTask(dataset, config.params, seed=config.seed, **common)
    raise TaskError(f"unknown task {config.name!r}; expected one of {', '.join(TASKS)}")
