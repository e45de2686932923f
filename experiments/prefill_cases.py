"""What it costs that prefill attends to quantized keys and values: cases of `experiments.bench_kernels`."""

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.kernel_cases import Case, normal, weight_bytes
from kernels_pallas.decode_attention import attention
from kernels_pallas.formats import MXFP4, NVFP4, Fp4Format
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.quantize import dequantize, quantize


class PrefillShape(NamedTuple):
    batch: int
    tokens: int
    heads: int
    q_heads: int
    dim: int


SHAPES = {
    "qwen3_30b_a3b": PrefillShape(8, 2048, 4, 32, 128),
    "qwen3_30b_a3b long": PrefillShape(8, 8192, 4, 32, 128),
    "qwen3_5_35b_a3b": PrefillShape(8, 2048, 2, 16, 256),
    "gpt_oss_20b": PrefillShape(8, 2048, 8, 64, 64),
}
Rows = tuple[jax.Array, ...]


def prefill_cases(shapes: Mapping[str, PrefillShape] = SHAPES, library: str = "cudnn") -> Iterator[Case]:
    """Per shape: quantize, then attend, beside attention in BF16; the rounding alone; attention over a cache's entries.

    Args:
        shapes: by the name of a model.
        library: `implementation` of `jax.nn.dot_product_attention`.
    """

    def attend(rows: Rows) -> jax.Array:
        return jax.nn.dot_product_attention(*rows, is_causal=True, implementation=library)

    for name, shape in shapes.items():
        for format in (NVFP4, MXFP4):

            def quantized_attend(rows: Rows, format: Fp4Format = format) -> jax.Array:
                q, k, v = rows
                return attend((q, *_rounded((k, v), format)))

            def round_alone(rows: Rows, format: Fp4Format = format) -> Rows:
                return _rounded(rows[1:], format)

            values = 2 * shape.batch * shape.tokens * shape.heads * shape.dim
            packed = weight_bytes(format, values) + values // shape.dim * format.has_row_scale
            # Everything that varies from call to call is in the first argument: XLA would round the same rows once.
            for op, run, moved in (
                ("prefill attention", quantized_attend, 0),
                ("prefill rounding of K and V", round_alone, 4 * values + 2 * packed),
            ):
                yield Case(
                    op=op,
                    shape=f"{name} {format.name} batch {shape.batch} tokens {shape.tokens} head {shape.dim}",
                    ours=run,
                    arguments=lambda shape=shape: (_rows(shape),),
                    baselines={} if moved else {"bf16 attention": attend},
                    bytes=moved,
                    bandwidth=moved > 0,
                )
            yield Case(
                op="prefill attention over the cache",
                shape=f"{name} {format.name} batch {shape.batch} tokens {shape.tokens} head {shape.dim}",
                ours=attention,
                arguments=functools.partial(_over_cache, shape, format),
                baselines={"bf16 attention": attend},
                baseline_arguments=lambda shape=shape: (_rows(shape),),
            )


def _over_cache(shape: PrefillShape, format: Fp4Format) -> tuple[jax.Array, KVCache, jax.Array]:
    """Queries of all tokens, their entries in a cache, and positions: what a model's prefill attends with."""
    q, k, v = _rows(shape)
    k, v = jax.jit(lambda rows: tuple(quantize(x, format) for x in rows))((k, v))
    positions = jnp.broadcast_to(jnp.arange(shape.tokens, dtype=jnp.int32), q.shape[:2])
    return q, KVCache(k=k, v=v), positions


def _rows(shape: PrefillShape) -> Rows:
    heads = (shape.q_heads, shape.heads, shape.heads)
    return tuple(
        normal(shape.batch, shape.tokens, count, shape.dim, seed=seed) for seed, count in enumerate(heads)
    )


def _rounded(rows: Rows, format: Fp4Format) -> Rows:
    """Through memory in FP4, as a cache holds them, and back to BF16."""
    return tuple(dequantize(quantize(x, format)) for x in rows)
