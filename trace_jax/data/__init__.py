"""Tokenizers, files of problems and Grain pipelines. Knows no model and no task: tasks are built on it."""

from trace_jax.data.hf_tokenizer import HfTokenizer
from trace_jax.data.jsonl import JsonlSource, Row
from trace_jax.data.load import check_own_tokenizer, load_tokenizer
from trace_jax.data.pipeline import encode_prompt, encode_text, prompt_iterator, sft_iterator
from trace_jax.data.problem import DataError, Problem, ProblemSource
from trace_jax.data.smollm2 import smollm2_file, smollm2_tokenizer
from trace_jax.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, TokenizerError, decode_response

__all__ = [
    "ByteTokenizer",
    "CharTokenizer",
    "DataError",
    "HfTokenizer",
    "JsonlSource",
    "Problem",
    "ProblemSource",
    "Row",
    "Tokenizer",
    "TokenizerError",
    "check_own_tokenizer",
    "decode_response",
    "encode_prompt",
    "encode_text",
    "load_tokenizer",
    "prompt_iterator",
    "sft_iterator",
    "smollm2_file",
    "smollm2_tokenizer",
]
