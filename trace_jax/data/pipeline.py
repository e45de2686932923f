"""Grain pipelines over problem sources. Their iterators' `get_state()` is a small JSON-able dict."""

from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32

from trace_jax.data.problem import DataError, Problem, ProblemSource
from trace_jax.data.tokenizer import Tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that begins: after the begin token where there is one and the text does not have it."""
    tokens, bos_id = tokenizer.encode(text), tokenizer.bos_id
    return tokens if bos_id is None or tokens[:1] == [bos_id] else [bos_id, *tokens]


def encode_prompt(source: ProblemSource, problem: Problem) -> Int32[np.ndarray, " tokens"]:
    """The prompt's ids; a chat template may have written the begin token already.

    Raises:
      DataError: no tokens, or more than `source.max_prompt_tokens`.
    """
    tokens = encode_text(source.tokenizer, problem.prompt)
    if not tokens:
        raise DataError(f"a prompt of task {source.name!r} has no tokens: {problem.prompt!r}")
    if len(tokens) > source.max_prompt_tokens:
        raise DataError(
            f"a prompt of task {source.name!r} has {len(tokens)} tokens (with the begin token), max_prompt_tokens "
            f"is {source.max_prompt_tokens}: {problem.prompt!r}. Raise max_prompt_tokens or make the task easier"
        )
    return np.asarray(tokens, np.int32)


def prompt_iterator(
    source: ProblemSource,
    batch: int,
    *,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    shuffle: bool = True,
    num_epochs: int | None = None,
) -> grain.DatasetIterator:
    """Batches of prompts: {"prompts": list of i32[tokens], "index": i64[batch], "problems": list of Problem}.

    Every epoch is shuffled anew. The problems of step n are the same set for any number of processes as long as
    batch * process_count, the global batch, is: processes take turns in one global order.

    Args:
      source: the problems.
      batch: prompts per batch of this process.
      seed: of the shuffle.
      process_index, process_count: this process's share.
      shuffle: False keeps the order of the source, for evaluation.
      num_epochs: None repeats for ever. A finite number ends with a smaller batch if need be.

    Raises:
      DataError: an empty source; while iterating, a prompt that is too long.
    """

    def collate(problems: Sequence[tuple[int, Problem]]) -> Mapping[str, Any]:
        return {
            "prompts": [encode_prompt(source, problem) for _, problem in problems],
            "index": np.asarray([index for index, _ in problems], np.int64),
            "problems": [problem for _, problem in problems],
        }

    dataset = _order(source, seed, shuffle, num_epochs)[process_index::process_count]
    return _iterate(dataset.map(lambda index: (index, source.sample(index))), batch, collate)


def sft_iterator(
    source: ProblemSource,
    batch: int,
    *,
    length: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator:
    """Batches of worked answers, padded: {"tokens": i32[batch, length], "loss_mask": bool[batch, length]}.

    A row is begin token, prompt, worked answer, end token, padding. The mask is True at the tokens of the worked
    answer and the end token: those that the token before them is trained to predict.

    Raises:
      DataError: an empty source; while iterating, a problem without a worked answer or longer than `length`.
    """

    def encode(index: int) -> tuple[np.ndarray, np.ndarray]:
        problem = source.sample(index)
        prompt = encode_prompt(source, problem)
        if problem.worked is None:
            raise DataError(
                f"task {source.name!r} has no worked answer for {problem.prompt!r}: it cannot be used for a warm start"
            )
        response = [*source.tokenizer.encode(problem.worked), source.tokenizer.eos_id]
        used = len(prompt) + len(response)
        if used > length:
            raise DataError(
                f"a worked answer of task {source.name!r} needs {used} tokens ({len(prompt)} of prompt, "
                f"{len(response)} of response), length is {length}: {problem.prompt!r} {problem.worked!r}"
            )
        tokens = np.full(length, source.tokenizer.pad_id, np.int32)
        tokens[:used] = [*prompt, *response]
        mask = np.zeros(length, bool)
        mask[len(prompt) : used] = True
        return tokens, mask

    def collate(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Mapping[str, Any]:
        return {"tokens": np.stack([row[0] for row in rows]), "loss_mask": np.stack([row[1] for row in rows])}

    dataset = _order(source, seed, True, None)[process_index::process_count]
    return _iterate(dataset.map(encode), batch, collate)


def _order(source: ProblemSource, seed: int, shuffle: bool, num_epochs: int | None) -> grain.MapDataset:
    if len(source) == 0:
        raise DataError(f"task {source.name!r} is empty: give it a size of at least 1")
    dataset = grain.MapDataset.range(len(source)).seed(seed)
    if shuffle:
        dataset = dataset.shuffle()
    return dataset.repeat(num_epochs)


def _iterate(dataset: grain.MapDataset, batch: int, collate: Any) -> grain.DatasetIterator:
    if batch < 1:
        raise DataError(f"batch is {batch}; expected at least 1")
    # No read threads: problems are made by Python code, which threads cannot speed up, and errors stay in order.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(dataset.batch(batch, batch_fn=collate).to_iter_dataset(options))
