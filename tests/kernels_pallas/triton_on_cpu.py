"""Compare interpreted Triton kernels with the reference: `python -m tests.kernels_pallas.triton_on_cpu OP`."""

import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels_pallas.activations import ClampedSwiglu
from kernels_pallas.arrays import Fp4Array, Fp4Codes, Stacked
from kernels_pallas.decode_attention import reference as attention_reference
from kernels_pallas.decode_attention import triton as attention_triton
from kernels_pallas.formats import MXFP4, NVFP4, Fp4Format
from kernels_pallas.grouped_matmul import reference as grouped_reference
from kernels_pallas.grouped_matmul import triton as grouped_triton
from kernels_pallas.guided_round import MODES
from kernels_pallas.guided_round import reference as guided_reference
from kernels_pallas.guided_round import triton as guided_triton
from kernels_pallas.kv_cache import KVCache, init_cache
from kernels_pallas.kv_cache import reference as cache_reference
from kernels_pallas.kv_cache import triton as cache_triton
from kernels_pallas.matmul import reference as matmul_reference
from kernels_pallas.matmul import triton as matmul_triton
from kernels_pallas.quantize import reference, triton
from kernels_pallas.tiled import EXACT_BELOW, tile
from tests.kernels_pallas.guided import guide_of, noisy
from tests.kernels_pallas.strategies import TIES
from tests.kernels_pallas.triton_interpreter import differences
from tests.kernels_pallas.triton_prefill_cases import prefill_cases

SHAPES = ((19, 64), (3, 768), (2, 2880), (1, 8192))
Case = tuple[str, object, object]


def rows(rng: np.random.Generator, shape: tuple[int, int]) -> Iterator[tuple[str, np.ndarray]]:
    """All bit patterns, Gaussian values, ties, wide spreads, values near both ends, zeros."""
    yield "bits", rng.integers(0, 2**16, shape, dtype=np.uint16).view(ml_dtypes.bfloat16)
    normal, row = rng.standard_normal(shape), rng.integers(-110, 115, (shape[0], 1))
    arrays = {
        "gaussian": normal,
        "ties": rng.choice(TIES, shape) * np.sign(normal) * np.ldexp(1.0, row // 2),
        "spread": normal * np.ldexp(1.0, rng.integers(-20, 3, shape)) * np.ldexp(1.0, row),
        "large": np.clip(normal, -3.9, 3.9) * 2.0**126,
        "subnormal": normal * 2.0**-128,
        "zeros": 0 * normal,
    }
    yield from ((name, x.astype(ml_dtypes.bfloat16)) for name, x in arrays.items())


def quantize_cases(rng: np.random.Generator, format: Fp4Format) -> Iterator[Case]:
    expected = jax.jit(reference.quantize_recorded, static_argnames="format")
    for shape in SHAPES:
        for name, x in rows(rng, shape):
            x = jnp.asarray(x)
            yield f"{shape} {name}", triton.quantize_recorded(x, format), expected(x, format=format)
        x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        plain = triton.quantize(x, format, axis=-1, row_axes=(-1,), scale_rule="amax")
        yield f"{shape} float32", plain, expected(x, format=format)[0]
        x, gain = x.astype(jnp.bfloat16), jnp.asarray(rng.standard_normal(shape[1]), jnp.bfloat16)
        h, *codes = triton.rms_norm_quantize(x, gain, 1e-6, format)
        yield f"{shape} codes of rms_norm", tuple(codes), expected(h, format=format)
        # Its sum runs in another order: an element may be the BF16 next to the reference's.
        step = np.asarray(h).view(np.int16).astype(int)
        step -= np.asarray(reference.rms_norm_quantize(x, gain, 1e-6, format)[0]).view(np.int16)
        yield f"{shape} rms_norm beyond one step", np.abs(step) > 1, np.zeros(shape, bool)


def guided_cases(rng: np.random.Generator, format: Fp4Format) -> Iterator[Case]:
    expected = jax.jit(guided_reference.guided_values, static_argnames="format")
    for shape in ((9, 64), (2, 768)):
        for name, x in rows(rng, shape):
            record = reference.quantize(jnp.asarray(noisy(x, 0, 0.1)), format)
            valid = jnp.asarray(rng.random(shape[0]) < 0.8)
            guides = {"own": None} | {
                f"{mode}{' compact' * compact}": guide_of(record, mode, valid, compact)
                for mode in MODES
                for compact in (False, True)
            }
            for kind, guide in guides.items():
                values = guided_triton.guided_values(jnp.asarray(x), guide, format)
                yield f"{shape} {name} {kind}", values, expected(jnp.asarray(x), guide, format=format)


def append_cases(rng: np.random.Generator, format: Fp4Format | None) -> Iterator[Case]:
    batch, tokens, heads, dim = 3, 5, 2, 64
    for layers in (None, 2):
        for paged in (False, True):
            cache = init_cache(7 if paged else batch, 8 if paged else 24, heads, dim, format, layers=layers)
            cache = jax.tree.map(
                lambda leaf: jnp.asarray(rng.integers(0, 100, leaf.shape)).astype(leaf.dtype), cache
            )
            k, v = (jnp.asarray(rng.standard_normal((batch, tokens, heads, dim)), jnp.bfloat16) for _ in "kv")
            positions = np.stack([rng.permutation(30)[:tokens] - 3 for _ in range(batch)])
            arguments = (
                cache,
                k,
                v,
                jnp.asarray(positions, jnp.int32),
                jnp.asarray(rng.random((3, 5)) < 0.8),
            )
            options = {"page_table": jnp.int32([[0, 3, -1], [5, 1, 2], [6, 4, -1]])} if paged else {}
            options |= {} if layers is None else {"layer": jnp.int32(1)}
            expected = cache_reference.append(*arguments, **options)
            yield f"layers {layers} paged {paged}", cache_triton.append(*arguments, **options), expected


def matmul_cases(rng: np.random.Generator, format: Fp4Format | None) -> Iterator[Case]:
    """Small integers: sums are exact in any order."""

    def integers(*shape):
        return jnp.asarray(rng.integers(-6, 7, shape), jnp.bfloat16)

    for experts, k, n, sizes in (
        (
            4,
            96,
            64,
            [11, 0, 20, 5],
        ),  # K is no multiple of a tile, neither is N; an empty group, rows to spare
        (3, 256, 160, [0, 40, 0]),
        (2, 64, 48, [0, 0]),
    ):
        x, w, sizes = integers(40, k), integers(experts, k, n), jnp.int32(sizes)
        bad = jnp.full_like(w, jnp.nan)
        if format is not None:
            x, w, bad = (
                reference.quantize(x, format),
                *(reference.quantize(a, format, axis=-2, row_axes=(-2, -1)) for a in (w, bad)),
            )
        stack = Stacked(jax.tree.map(lambda *leaves: jnp.stack(leaves), bad, w), jnp.int32(1))
        expected = grouped_reference.grouped_matmul(x, w, sizes)
        for name, weights in (("plain", w), ("layer of a stack", stack)):
            out = grouped_triton.grouped_matmul(x, weights, sizes)
            yield f"{experts} x {k} x {n} {name}", out, expected
        # NaN in one matrix reaches no other group's rows, nor rows of no group.
        poisoned = jax.tree.map(lambda good, bad: good.at[0].set(bad[0]), w, bad)
        yield (
            f"{experts} x {k} x {n} poisoned",
            grouped_triton.grouped_matmul(x, poisoned, sizes)[sizes[0] :],
            (expected[sizes[0] :]),
        )
    if format is None:
        x, w = integers(5, 2048), integers(2048, 96)
        stack = Stacked(jnp.stack([jnp.full_like(w, jnp.nan), w]), jnp.int32(1))
        expected = matmul_reference.matmul(x, w, mode="fast")
        for mode in ("fast", "invariant"):
            yield f"{mode}, layer of a stack", matmul_triton.matmul(x, stack, mode=mode), expected
    if format is not None:
        x, w = integers(5, 2048), reference.quantize(integers(2048, 96), format, axis=-2, row_axes=(-2, -1))
        expected = matmul_reference.matmul(x, w, mode="fast")
        for mode in ("fast", "invariant"):
            yield mode, matmul_triton.matmul(x, w, mode=mode), expected
        # Every scale byte of a finite block, beside every code but -0.
        least, most = format.scale_range
        ranges = [(least, most)]
        if format is MXFP4:  # see `tiled`
            ranges = [(least, 128), (most - EXACT_BELOW, most)]
        for least, most in ranges:
            codes = rng.integers(0, 16, (256, most - least + 1))
            scales = np.broadcast_to(np.arange(least, most + 1), (256 // format.block, most - least + 1))
            codes = Fp4Codes(
                codes=jnp.asarray(np.where(codes == 8, 7, codes).T, jnp.uint8),
                scales=jnp.asarray(scales.T, jnp.uint8),
                row_exponent=jnp.full((1,), 127, jnp.uint8),
                format=format,
            )
            w = Fp4Array.from_codes(codes, -2)
            one = jnp.eye(256, dtype=jnp.bfloat16)
            yield (
                f"scale bytes {least} to {most}",
                matmul_triton.matmul(one, w, mode="fast"),
                matmul_reference.matmul(one, w, mode="fast"),
            )


def epilogue_cases(rng: np.random.Generator, format: Fp4Format | None) -> Iterator[Case]:
    """Biases, bit for bit since sums are exact, and activations to rounding of an exponential."""
    clamped = ClampedSwiglu(alpha=1.702, limit=7.0)
    for experts, k, n, sizes in ((4, 96, 64, [11, 0, 20, 5]), (3, 128, 160, [0, 40, 0]), (2, 64, 48, [0, 0])):
        x = jnp.asarray(rng.integers(-2, 3, (40, k)), jnp.bfloat16)
        w = jnp.asarray(rng.integers(-6, 7, (experts, k, n)) / 8, jnp.bfloat16)
        bias, sizes = jnp.asarray(rng.integers(-8, 9, (experts, n)), jnp.float32), jnp.int32(sizes)
        # What shows if it is read: another layer, and another group's matrix and biases.
        bad = jnp.full_like(w, jnp.nan)
        if format is not None:
            x = reference.quantize(x, format)
            w, bad = (reference.quantize(a, format, axis=-2, row_axes=(-2, -1)) for a in (w, bad))
        poisoned = jax.tree.map(lambda good, bad: good.at[0].set(bad[0]), w, bad)
        for activation in (None, "swiglu", clamped):
            gated = activation is not None
            stack = [a if format is None else tile(a, gated=gated) for a in (bad, w)]
            stack = Stacked(jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack), jnp.int32(1))
            for what, weights, biases in (
                ("plain", w, bias.astype(jnp.bfloat16)),
                ("layer of a stack", stack, bias),
                ("poisoned", poisoned, bias),
                ("poisoned bias", w, bias.at[0].set(jnp.nan)),
            ):
                arguments = (x, weights, sizes, biases)
                out = grouped_triton.grouped_matmul(*arguments, activation=activation)
                expected = grouped_reference.grouped_matmul(*arguments, activation=activation)
                name = f"{experts} x {k} x {n} {what} {activation}"
                if activation is None:
                    yield name, out, expected
                    continue
                near = jnp.abs(out - expected) <= 1e-6 * jnp.maximum(1.0, jnp.abs(expected))
                same = near | (jnp.isnan(out) & jnp.isnan(expected))
                yield name, same, jnp.ones_like(same)


def attention_cases(rng: np.random.Generator, format: Fp4Format | None) -> Iterator[Case]:
    """Within a rounding of BF16 weights: what is yielded is whether elements are further apart."""
    for heads, q_heads, dim in ((4, 8, 128), (2, 6, 64), (1, 8, 256)):
        length = 128 if dim != 128 else 1088  # more than one chunk
        k, v = (jnp.asarray(rng.standard_normal((2, length, heads, dim)), jnp.bfloat16) for _ in "kv")
        if format is not None:
            k, v = reference.quantize(k, format), reference.quantize(v, format)
        cache = KVCache(k=k, v=v)
        q = jnp.asarray(rng.standard_normal((2, 1, q_heads, dim)), jnp.bfloat16)
        positions = jnp.int32([[length - 7], [37]])
        page = 64 if format is None else 32  # a tile
        pages = jax.tree.map(lambda leaf, page=page: leaf.reshape(-1, page, *leaf.shape[2:]), cache)
        table = jnp.arange(2 * length // page, dtype=jnp.int32).reshape(2, -1)
        sinks = jnp.asarray(rng.standard_normal(q_heads), jnp.float32)
        for name, entries, options in (
            ("plain", cache, {}),
            ("window and sinks", cache, {"window": 50, "sinks": sinks}),
            ("pages", pages, {"page_table": table.at[1, 2:].set(-1)}),
            ("a page missing", pages, {"page_table": table.at[:, 0].set(-1)}),
        ):
            out = attention_triton.attention(q, entries, positions, **options).astype(jnp.float32)
            expected = attention_reference.attention(q, entries, positions, **options).astype(jnp.float32)
            far = jnp.abs(out - expected) > 2.0**-7 * jnp.maximum(1.0, jnp.abs(expected))
            yield f"head {dim} {name}", far, jnp.zeros_like(far)


CASES = {
    "quantize": quantize_cases,
    "guided_values": guided_cases,
    "append": append_cases,
    "matmul": matmul_cases,
    "epilogue": epilogue_cases,
    "attention": attention_cases,
    "prefill": prefill_cases,
}


def main(op: str) -> int:
    """Print a line per case; 1 if any differs."""
    cases = CASES[op]
    everything = op in ("append", "matmul", "epilogue", "attention", "prefill")
    formats = (None, NVFP4, MXFP4) if everything else (NVFP4, MXFP4)
    failed = 0
    for format in formats:
        for name, actual, expected in cases(np.random.default_rng(0), format):
            count = differences(actual, expected)
            failed |= count > 0
            print(f"{format and format.name} {name}: {count} differences")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
