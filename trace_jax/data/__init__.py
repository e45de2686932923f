"""Tokenizers and Grain pipelines. Knows no model and no task: tasks are built on it."""

from trace_jax.data.pipeline import encode_prompt, prompt_iterator, sft_iterator
from trace_jax.data.problem import DataError, Problem, ProblemSource
from trace_jax.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "CharTokenizer",
    "DataError",
    "Problem",
    "ProblemSource",
    "Tokenizer",
    "encode_prompt",
    "prompt_iterator",
    "sft_iterator",
]
