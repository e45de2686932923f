"""Verifiable tasks: problems by index, and a score for what the policy answered."""

import dataclasses
from typing import Any

from trace_jax.config import from_mapping
from trace_jax.data.problem import Problem
from trace_jax.tasks.arithmetic import ArithmeticConfig, ArithmeticTask
from trace_jax.tasks.base import Split, Task, TaskError
from trace_jax.tasks.reasoning_gym import ReasoningGymTask

__all__ = [
    "ArithmeticConfig",
    "ArithmeticTask",
    "Problem",
    "ReasoningGymTask",
    "Split",
    "Task",
    "TaskConfig",
    "TaskError",
    "make_task",
]

TASKS = ("arithmetic", "reasoning_gym/<task>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which problems a run trains and is evaluated on.

    Attributes:
      name: "arithmetic", or "reasoning_gym/<task>" such as "reasoning_gym/chain_sum".
      params: the task's own options: fields of ArithmeticConfig, or of reasoning-gym's config of that task.
      train_size, eval_size: number of problems of each split.
      seed: of the problems; the splits do not depend on it and never share a problem.
      max_prompt_tokens: longest prompt with its begin token; a longer one is an error, not cut.
    """

    name: str = "arithmetic"
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_size: int = 65536
    eval_size: int = 256
    seed: int = 0
    max_prompt_tokens: int = 16

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
      ConfigError: options of "arithmetic" that do not exist or have the wrong type.
    """
    size = config.train_size if split == "train" else config.eval_size
    if size == 0:
        raise TaskError(f"task {config.name!r} is empty: {split}_size is 0, expected at least 1")
    common = {
        "split": split,
        "size": size,
        "seed": config.seed,
        "max_prompt_tokens": config.max_prompt_tokens,
    }
    kind, _, dataset = config.name.partition("/")
    if config.name == "arithmetic":
        return ArithmeticTask(from_mapping(ArithmeticConfig, config.params, prefix="task.params"), **common)
    if kind == "reasoning_gym" and dataset:
        return ReasoningGymTask(dataset, config.params, **common)
    raise TaskError(f"unknown task {config.name!r}; expected one of {', '.join(TASKS)}")
