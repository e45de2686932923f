"""Llama models from GGUF files: the quantized weights as FP32 arrays in this code's layout."""

import os
from typing import Any

import numpy as np

from trace_jax.models.config import ModelConfig
from trace_jax.models.rope import RopeConfig

Parameters = dict[tuple[str, ...], np.ndarray]

# Parameters of one layer: the tensors of the file that lie side by side in each, and their shape, [out, in] as in the
# file. D hidden, F MLP width, q and k the query and KV heads together, V vocabulary.
_LAYER = {
    ("attention", "norm"): (("attn_norm",), "D"),
    ("attention", "query"): (("attn_q",), "qD"),
    ("attention", "key"): (("attn_k",), "kD"),
    ("attention", "value"): (("attn_v",), "kD"),
    ("attention", "output"): (("attn_output",), "Dq"),
    ("dense", "norm"): (("ffn_norm",), "D"),
    ("dense", "gate_up"): (("ffn_gate", "ffn_up"), "FD"),
    ("dense", "down"): (("ffn_down",), "DF"),
}


class GgufError(ValueError):
    """A GGUF file that cannot be used; the message names the file and the entry or tensor."""


def read_llama(path: str | os.PathLike) -> tuple[ModelConfig, Parameters]:
    """Reads a dense Llama model, dequantized.

    Args:
      path: a GGUF file of architecture `llama`.

    Returns:
      Its config, of family `llama`, and FP32 arrays by path: `attention` (`norm` `[L, D]`, `query` `[L, D, q]`, `key`
      and `value` `[L, D, k]`, `output` `[L, q, D]`), `dense` (`norm` `[L, D]`, `gate_up` `[L, D, 2F]` with the gate's
      columns first, `down` `[L, F, D]`), `embedding` `[V, D]`, `final_norm` `[D]` and, unless the embedding is tied,
      `head` `[D, V]`. Queries and keys are in half-split order for RoPE; the file has the two halves interleaved.

    Raises:
      GgufError: not GGUF, truncated, another architecture, an entry or tensor that is missing, misshapen or has no
        place here (such as RoPE scaling), or the package `gguf` is absent.
      FileNotFoundError: no such file.
    """
    entries, tensors = _open(path)
    config = _config(path, entries, tied="output.weight" not in tensors)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    sizes = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.dense_hidden_size,
        "q": config.num_heads * config.head_dim,
        "k": config.num_kv_heads * config.head_dim,
    }

    def take(name: str, shape: str) -> np.ndarray:
        expected = tuple(sizes[letter] for letter in shape)
        if name not in tensors:
            raise GgufError(f"{path} has no tensor {name!r}; expected one of shape {expected}")
        tensor = tensors.pop(name)
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != expected:
            raise GgufError(f"tensor {name!r} of {path} has shape {found}; expected {expected}")
        return _dequantize(path, tensor)

    def parameter(layer: int, names: tuple[str, ...], shape: str) -> np.ndarray:
        parts = [take(f"blk.{layer}.{name}.weight", shape) for name in names]
        if names[0] in heads:
            parts = [_half_split(parts[0], heads[names[0]])]
        return np.concatenate([part.T for part in parts], axis=-1)

    parameters = {
        key: np.stack([parameter(layer, names, shape) for layer in range(config.num_layers)])
        for key, (names, shape) in _LAYER.items()
    }
    parameters["embedding",] = take("token_embd.weight", "VD")
    parameters["final_norm",] = take("output_norm.weight", "D")
    if not config.tied_embedding:
        parameters["head",] = np.ascontiguousarray(take("output.weight", "VD").T)
    if tensors:
        raise GgufError(
            f"{path} has tensors that a Llama model has no place for: {', '.join(sorted(tensors))}"
        )
    return config, parameters


def _open(path: str | os.PathLike) -> tuple[Any, dict[str, Any]]:
    """The file's metadata, a function of name and default, and its tensors by name, still quantized."""
    try:
        import gguf
    except ImportError as error:
        raise GgufError(
            f"reading {path} needs the package gguf ({error}): pip install 'trace-jax[smollm2]'"
        ) from error
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no GGUF file at {path}")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # what its own parsing runs into
        raise GgufError(f"{path} is not a GGUF file, or a truncated one: {error}") from error

    def entry(name: str, default: Any = None) -> Any:
        field = reader.get_field(name)
        if field is None and default is None:
            raise GgufError(f"{path} has no metadata entry {name!r}")
        return default if field is None else field.contents()

    return entry, {tensor.name: tensor for tensor in reader.tensors}


def _config(path: str | os.PathLike, entry: Any, tied: bool) -> ModelConfig:
    architecture = entry("general.architecture")
    if architecture != "llama":
        raise GgufError(f"{path} is of architecture {architecture!r}; expected 'llama'")
    if entry("llama.expert_count", 0):
        raise GgufError(f"{path} has {entry('llama.expert_count')} experts a layer; expected a dense model")
    hidden, heads = entry("llama.embedding_length"), entry("llama.attention.head_count")
    head_dim = entry("llama.attention.key_length", hidden // heads)
    rotated = entry("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise GgufError(f"{path} rotates {rotated} of a head's {head_dim} dimensions; expected all of them")
    if entry("llama.rope.scaling.type", "none") != "none":
        raise GgufError(f"{path} scales RoPE ({entry('llama.rope.scaling.type')}); expected no scaling")
    layers = entry("llama.block_count")
    return ModelConfig(
        family="llama",
        vocab_size=entry("llama.vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=entry("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        dense_layers=layers,
        dense_hidden_size=entry("llama.feed_forward_length"),
        qk_norm="none",
        rope=RopeConfig(theta=_decimal(entry("llama.rope.freq_base", 10_000.0))),
        norm_eps=_decimal(entry("llama.attention.layer_norm_rms_epsilon")),
        tied_embedding=tied,
    )


def _decimal(stored: float) -> float:
    """What was meant by a number that is stored in FP32, where 1e-5 is 9.99999975e-06: its shortest decimal."""
    return float(str(np.float32(stored)))


def _dequantize(path: str | os.PathLike, tensor: Any) -> np.ndarray:
    from gguf.quants import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise GgufError(
            f"tensor {tensor.name!r} of {path} has type {tensor.tensor_type.name}, which gguf cannot read"
        ) from error


def _half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (x0, x_h, x1, x_{h+1}, ...), h half a head, to halves (x0, x1, ..., x_h, ...)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
