"""What `experiments.bench_kernels` times: named shapes of real models, each kernel beside its baselines."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.activations import Activation, activated
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.decode_attention import attention
from kernels_pallas.formats import MXFP4, NVFP4, Fp4Format
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.grouped_matmul.shapes import GPT_OSS
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.matmul import matmul
from kernels_pallas.matmul.triton import decoded_in_kernel, decoded_once
from kernels_pallas.quantize import quantize
from kernels_pallas.tiled import TiledFp4Array, tile
from kernels_pallas.tiled_matmul import decoded

Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
      op, shape: what is timed.
      ours: the kernel, called with `arguments`.
      baselines: by name, called with `baseline_arguments`; the fastest counts.
      arguments, baseline_arguments: made on the device when the case is run.
      carried: the result takes the place of the first argument, and its buffer.
      bytes: that `ours` must move, each input read once and each output written once.
      must, aim: smallest ratio of the baseline's time to ours; for `bandwidth`, smallest share of a copy's.
      bandwidth: the baseline is a copy on the device.
    """

    op: str
    shape: str
    ours: Run
    arguments: Callable[[], tuple[Any, ...]]
    baselines: Mapping[str, Run] = dataclasses.field(default_factory=dict)
    baseline_arguments: Callable[[], tuple[Any, ...]] | None = None
    bytes: int = 0
    must: float | None = None
    aim: float | None = None
    bandwidth: bool = False
    carried: bool = False


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """Normal BF16 numbers."""
    return jax.jit(lambda: (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16))()


def weights(format: Fp4Format, *shape: int, gated: bool = False) -> TiledFp4Array:
    """Random codes and scales, tiled: values do not matter to speed, but are not all alike."""

    def make():
        k, n = shape[-2:]
        keys = jax.random.split(jax.random.key(1))
        words = jax.random.bits(keys[0], (*shape[:-2], k // 8, n), jnp.uint32)
        scales = jax.random.randint(keys[1], (*shape[:-2], k // format.block, n), 100, 126).astype(jnp.uint8)
        exponent = jnp.full(shape[:-2], 120, jnp.uint8)
        w = Fp4Array(words=words, scales=scales, row_exponent=exponent, format=format, axis=-2)
        return tile(w, gated=gated)

    return jax.jit(make)()


def quantized(format: Fp4Format, x: jax.Array) -> Fp4Array:
    return jax.jit(functools.partial(quantize, format=format))(x)


# --- matmul -----------------------------------------------------------------------------------------

DENSE = (8192, 28672)  # 470 MB in BF16: several times any cache


def matmul_cases() -> Iterator[Case]:
    """Dense FP4 weights against the library's BF16 GEMM."""
    k, n = DENSE
    musts = {1: (2.0, 2.8), 16: (2.0, 2.8), 64: (1.4, 2.0), 256: (0.9, 1.0), 2048: (0.85, 0.95)}
    for rows, (must, aim) in musts.items():
        for format in (NVFP4, MXFP4):
            yield Case(
                op="matmul",
                shape=f"{format.name} {rows} x {k} x {n}",
                ours=functools.partial(matmul, mode="fast"),
                arguments=functools.partial(_dense_arguments, format, rows),
                baselines={"bf16 library": functools.partial(_library, "mk,kn->mn")},
                baseline_arguments=lambda rows=rows: (normal(rows, k), normal(k, n, seed=1)),
                bytes=_dense_bytes(format, rows),
                must=2.1 if format is MXFP4 and rows <= 16 else must,
                aim=aim,
            )
    for rows in (1, 16, 64, 256):
        yield Case(
            op="matmul invariant",
            shape=f"nvfp4 {rows} x {k} x {n}",
            ours=functools.partial(matmul, mode="invariant"),
            arguments=functools.partial(_dense_arguments, NVFP4, rows),
            baselines={"fast mode": functools.partial(matmul, mode="fast")},
            bytes=_dense_bytes(NVFP4, rows),
            must=0.75,
            aim=0.85,
        )
    for rows in (256, 512, 1024, 2048):  # where `dispatch.json` has the switch of mode "fast"
        for format in (NVFP4, MXFP4):
            yield Case(
                op="matmul, decoded in the kernel",
                shape=f"{format.name} {rows} x {k} x {n}",
                ours=decoded_in_kernel,
                arguments=functools.partial(_dense_arguments, format, rows),
                baselines={"decoded once": decoded_once},
                bytes=_dense_bytes(format, rows),
            )
    for format in (NVFP4, MXFP4):
        yield Case(
            op="dequantize weights",
            shape=f"{format.name} {k} x {n}",
            ours=decoded,
            arguments=lambda format=format: (weights(format, k, n),),
            bytes=weight_bytes(format, k, n) + 2 * k * n,
            must=0.65,
            aim=0.85,
            bandwidth=True,
        )


def _dense_arguments(format: Fp4Format, rows: int) -> tuple[Any, ...]:
    return normal(rows, DENSE[0]), weights(format, *DENSE)


def _dense_bytes(format: Fp4Format, rows: int) -> int:
    k, n = DENSE
    return weight_bytes(format, k, n) + 2 * rows * k + 4 * rows * n


def _library(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, w, preferred_element_type=jnp.float32)


def weight_bytes(format: Fp4Format, *shape: int) -> int:
    """Of packed weights: 4 bits a value and a byte a block."""
    values = functools.reduce(lambda a, b: a * b, shape)
    return values // 2 + values // format.block


# --- grouped matmul ---------------------------------------------------------------------------------

EXPERTS = {  # experts, K, N of gate and up projections, their activation, and whether biases come before it
    "qwen3_30b_a3b": (128, 2048, 1536, "swiglu", False),
    "qwen3_5_35b_a3b": (256, 2048, 1024, "swiglu", False),
    "gpt_oss_20b": (32, 2880, 5760, GPT_OSS, True),
}


def grouped_cases() -> Iterator[Case]:
    """Gate and up projections with what follows them, biases and activation, 1 to 2048 rows an expert, against the best
    of three BF16 ways to do the same; and of these our own.
    """
    for model, (experts, k, n, activation, biased) in EXPERTS.items():
        multiply = functools.partial(_multiply, activation)
        own = functools.partial(multiply, implementation="triton")
        operands = functools.partial(_grouped_arguments, experts=experts, k=k, n=n, biased=biased)
        others = 4 * n // 2 + 2 * k  # bytes a row: the result in FP32, its input in BF16
        biases = 2 * experts * n * biased
        for each in (1, 4, 16, 64, 256, 2048):
            rows = experts * each
            if rows > 2048 and model != "qwen3_30b_a3b":
                continue
            baselines = {"our bf16": own, "einsum": functools.partial(_batched, activation)}
            if each <= 64:  # it multiplies every row by every expert's matrix
                baselines["ragged_dot"] = functools.partial(_ragged, activation)
            for format in (NVFP4, MXFP4):
                few = each <= 4
                yield Case(
                    op="grouped_matmul",
                    shape=f"{model} {format.name} {rows} rows ({each} an expert)",
                    ours=multiply,
                    arguments=functools.partial(operands, format, rows),
                    baselines=baselines,
                    baseline_arguments=functools.partial(operands, None, rows),
                    bytes=weight_bytes(format, experts, k, n) + biases + rows * others,
                    must=1.9 if few else None,
                    aim=2.7 if few else None,
                )
        rows = 4 * experts
        yield Case(
            op="grouped_matmul bf16",
            shape=f"{model} {rows} rows (4 an expert)",
            ours=own,
            arguments=functools.partial(operands, None, rows),
            bytes=2 * experts * k * n + biases + rows * others,
            must=0.7,
            bandwidth=True,
        )


def _grouped_arguments(
    format: Fp4Format | None, rows: int, *, experts: int, k: int, n: int, biased: bool
) -> tuple[Any, ...]:
    """Rows, gated weights, as many rows for each expert, and biases or None."""
    w = normal(experts, k, n, seed=1, scale=k**-0.5)
    if format is not None:
        w = weights(format, experts, k, n, gated=True)
    bias = normal(experts, n, seed=2) if biased else None
    return normal(rows, k), w, jnp.full((experts,), rows // experts, jnp.int32), bias


def _multiply(
    activation: Activation,
    x: Any,
    w: Any,
    sizes: jax.Array,
    bias: jax.Array | None,
    implementation: str | None = None,
) -> jax.Array:
    return grouped_matmul(x, w, sizes, bias=bias, activation=activation, implementation=implementation)


def _batched(
    activation: Activation, x: jax.Array, w: jax.Array, sizes: jax.Array, bias: jax.Array | None
) -> jax.Array:
    blocks = x.reshape(w.shape[0], -1, x.shape[-1])
    out = _library("ebk,ekn->ebn", blocks, w)
    return activated(out if bias is None else out + bias[:, None], activation).reshape(x.shape[0], -1)


def _ragged(
    activation: Activation, x: jax.Array, w: jax.Array, sizes: jax.Array, bias: jax.Array | None
) -> jax.Array:
    out = lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
    if bias is not None:
        out = out + jnp.repeat(bias, x.shape[0] // w.shape[0], axis=0)
    return activated(out, activation)


# --- attention --------------------------------------------------------------------------------------

PAGE = 128  # positions of a page


def attention_cases() -> Iterator[Case]:
    """Decode attention over FP4 entries, against the same kernel over BF16 and cuDNN's."""
    shapes = (  # batch, length, KV heads, query heads, head dimension
        ("qwen3_30b_a3b", 64, 8192, 4, 32, 128),
        ("qwen3_30b_a3b", 32, 8192, 4, 32, 128),
        ("qwen3_30b_a3b", 64, 1024, 4, 32, 128),
        ("qwen3_5_35b_a3b", 64, 8192, 2, 16, 256),
        ("gpt_oss_20b", 64, 8192, 8, 64, 64),
    )
    for model, batch, length, heads, q_heads, dim in shapes:
        long, promised = length >= 8192, dim == 128
        baselines = {"our bf16": attention, "cuDNN": _cudnn}
        for format in (NVFP4, MXFP4):
            yield Case(
                op="decode_attention",
                shape=f"{model} {format.name} batch {batch} context {length} head {dim}",
                ours=attention,
                arguments=functools.partial(attention_arguments, format, batch, length, heads, q_heads, dim),
                baselines=baselines,
                baseline_arguments=functools.partial(
                    attention_arguments, None, batch, length, heads, q_heads, dim
                ),
                bytes=_entry_bytes(format, batch * length * heads, dim),
                must=None if not promised else 1.7 if long else 1.0,
                aim=None if not promised else 2.5 if long else 1.3,
            )
    for format in (NVFP4, MXFP4, None):
        sizes = (64, 8192, 4, 32, 128)
        yield Case(
            op="decode_attention paged",
            shape=f"qwen3_30b_a3b {format.name if format else 'bf16'} batch 64 context 8192 head 128 pages of {PAGE}",
            ours=_paged,
            arguments=functools.partial(_pages, format, *sizes),
            baselines={"in rows": attention},
            baseline_arguments=functools.partial(attention_arguments, format, *sizes),
            bytes=_entry_bytes(format, 64 * 8192 * 4, 128),
        )
    yield Case(
        op="decode_attention bf16",
        shape="qwen3_30b_a3b batch 64 context 8192 head 128",
        ours=attention,
        arguments=functools.partial(attention_arguments, None, 64, 8192, 4, 32, 128),
        baselines={"cuDNN": _cudnn},
        bytes=_entry_bytes(None, 64 * 8192 * 4, 128),
        must=0.9,
    )


def _entry_bytes(format: Fp4Format | None, entries: int, dim: int) -> int:
    """Of keys and values of as many (position, KV head)."""
    if format is None:
        return 4 * entries * dim
    return 2 * (weight_bytes(format, entries, dim) + entries * (format is NVFP4))


def attention_arguments(
    format: Fp4Format | None, batch: int, length: int, heads: int, q_heads: int, dim: int
):
    """Queries of one token, a full cache, and positions that see all of it."""
    shape = (batch, length, heads, dim)
    k, v = normal(*shape, seed=1), normal(*shape, seed=2)
    if format is not None:
        k, v = quantized(format, k), quantized(format, v)
    positions = jnp.full((batch, 1), length - 1, jnp.int32)
    return normal(batch, 1, q_heads, dim), KVCache(k=k, v=v), positions


def _pages(format: Fp4Format | None, batch: int, length: int, heads: int, q_heads: int, dim: int):
    """`attention_arguments` with the cache in pages, in random order, and their table."""
    q, cache, positions = attention_arguments(format, batch * length // PAGE, PAGE, heads, q_heads, dim)
    table = np.random.default_rng(0).permutation(len(positions)).reshape(batch, -1)
    positions = jnp.full((batch, 1), length - 1, jnp.int32)
    return q[:batch], cache, positions, jnp.asarray(table, jnp.int32)


def _paged(q: jax.Array, cache: KVCache, positions: jax.Array, page_table: jax.Array) -> jax.Array:
    return attention(q, cache, positions, page_table=page_table)


def _cudnn(q: jax.Array, cache: KVCache, positions: jax.Array) -> jax.Array:
    lengths = positions[:, 0] + 1
    return jax.nn.dot_product_attention(
        q, cache.k, cache.v, key_value_seq_lengths=lengths, implementation="cudnn"
    )


KERNEL_GROUPS = {
    "matmul": matmul_cases,
    "grouped_matmul": grouped_cases,
    "decode_attention": attention_cases,
}
