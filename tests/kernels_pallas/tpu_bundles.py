"""Compiles every TPU kernel for real TPUs, without one, and counts the instructions of its final schedule.

    python -m tests.kernels_pallas.tpu_bundles [--generation 6] [--only NAME] [--all] [--write]

prints JSON {generation: {case: {"bundles": count, "program": hash}}}; --write also replaces these cases in
tests/data/tpu_bundles.json. Needs libtpu (`pip install .[tpu]`). A process of its own: libtpu reads its flags once, and
refuses a second process unless told otherwise. The counts are static: a loop's body counts once, and no time follows
from them.

A compiler makes the same of the same program: where what it would be given and its version are those of the table, the
count is the table's, and nothing is compiled, but for the small cases, and with --all.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "data" / "tpu_bundles.json"
TOPOLOGIES = {5: "v5e:2x2", 6: "v6e:2x2", 7: "tpu7x:2x2x1"}
SMALL = ("tile ", " tiny ")  # cases that are always compiled: every op, and what decoding costs
TILE = 512  # K and N of the tile whose decoding is compared with BF16 weights, at 16 rows


def prepare(dump: str) -> None:
    """Set what libtpu reads when it loads; before JAX is imported."""
    # Of the schedules of all passes, which take more time to write than to make, the last ones.
    flags = (
        f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
    )
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ["LIBTPU_INIT_ARGS"] = flags


def cases() -> Iterator[tuple[str, str, Callable, tuple]]:
    """(name, start of the kernel's name, function, shapes of its arguments)."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.arrays import Stacked
    from kernels_pallas.decode_attention import attention
    from kernels_pallas.decode_attention.shapes import SHAPES as ATTENTION
    from kernels_pallas.formats import MXFP4, NVFP4
    from kernels_pallas.grouped_matmul import grouped_matmul
    from kernels_pallas.grouped_matmul.shapes import SHAPES as GROUPED
    from kernels_pallas.guided_round import Guide, guided_round, guided_values
    from kernels_pallas.kv_cache import append, init_cache
    from kernels_pallas.matmul import matmul
    from kernels_pallas.matmul.shapes import SHAPES as MATMUL
    from kernels_pallas.quantize import quantize, quantize_recorded, rms_norm_quantize
    from kernels_pallas.quantize.shapes import SHAPES as QUANTIZE

    tpu = {"implementation": "pallas_tpu"}

    def of(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def weights(shape, format):
        if format is None:
            return of(shape)
        return jax.eval_shape(lambda w: quantize(w, format, axis=-2, row_axes=(-2, -1)), of(shape))

    def label(format):
        return "bf16" if format is None else format.name

    for format in (None, NVFP4, MXFP4):
        shapes = (
            of((16, TILE)),
            *jax.tree.leaves(weights((TILE, TILE), format))[: 1 if format is None else 2],
        )
        yield f"tile {label(format)}", "tile", tile(format), shapes

    for name, s in MATMUL.items():
        for format in (NVFP4, MXFP4):
            run = lambda x, w: matmul(x, w, **tpu)  # noqa: E731
            yield (
                f"matmul {name} {label(format)}",
                "matmul",
                run,
                (of((s.m, s.k)), weights((s.k, s.n), format)),
            )

    for name, s in GROUPED.items():
        for format in (None, NVFP4, MXFP4):

            def run(x, w, layer, sizes, bias, s=s):
                options = {"bias": bias, "activation": s.activation, **tpu}
                return grouped_matmul(x, Stacked(array=w, layer=layer), sizes, **options)

            stack = weights((2, s.experts, s.k, s.n), format)
            bias = of((s.experts, s.n)) if s.biased else None
            shapes = (of((s.rows, s.k)), stack, of((), jnp.int32), of((s.experts,), jnp.int32), bias)
            yield f"grouped_matmul {name} {label(format)}", "grouped_matmul", run, shapes

    for name, s in ATTENTION.items():
        c = s.cache
        for format in (None, NVFP4, MXFP4):
            # A batch whose cache, laid out anew at the boundary of jit, fits a v5e; pages of whole registers.
            batch, length, table = 8, c.length, ()
            if c.page_size:
                batch, length, table = 64, 128, (of((8, c.length // 128), jnp.int32),)
            cache = jax.eval_shape(
                lambda f=format, b=batch, n=length, c=c: init_cache(b, n, c.kv_heads, c.head_dim, f, layers=2)
            )
            new, position, scalar = (
                of((8, 1, c.kv_heads, c.head_dim)),
                of((8, 1), jnp.int32),
                of((), jnp.int32),
            )

            def write(cache, k, v, positions, valid, layer, *table):
                paged = {"page_table": table[0] if table else None}
                return append(cache, k, v, positions, valid, layer=layer, **paged, **tpu)

            def read(q, cache, positions, layer, sinks, *table, s=s):
                options = {"page_table": table[0] if table else None, "window": s.window}
                sinks = sinks if s.sinks else None
                return attention(q, cache, positions, layer=layer, sinks=sinks, **options, **tpu)

            shapes = (cache, new, new, position, of((8, 1), jnp.bool_), scalar, *table)
            yield f"kv_append {name} {label(format)}", "kv_append", write, shapes
            sinks = of((s.q_heads,), jnp.float32)
            shapes = (of((8, 1, s.q_heads, c.head_dim)), cache, position, scalar, sinks, *table)
            yield f"decode_attention {name} {label(format)}", "decode_attention", read, shapes

    for name, s in QUANTIZE.items():
        if s.axis != -1 or s.shape[-1] > 4096:
            continue
        for format in (NVFP4, MXFP4):
            x, gain = of(s.shape), of(s.shape[-1:])
            codes = jax.eval_shape(lambda x, f=format: quantize_recorded(x, f), x)
            guide = Guide(
                scales=codes[0].scales,
                row_exponent=codes[0].row_exponent,
                mantissa=codes[1],
                valid=of(s.shape[:-1], jnp.bool_),
                mode="mantissa",
            )
            runs = {
                "quantize": (lambda x, f=format: quantize(x, f, **tpu), (x,)),
                "quantize_recorded": (lambda x, f=format: quantize_recorded(x, f, **tpu), (x,)),
                "rms_norm_quantize": (
                    lambda x, g, f=format: rms_norm_quantize(x, g, 1e-6, f, **tpu),
                    (x, gain),
                ),
                "guided_round": (lambda x, g, f=format: guided_round(x, g, f, **tpu), (x, guide)),
                "guided_values": (lambda x, g, f=format: guided_values(x, g, f, **tpu), (x, guide)),
            }
            for op, (run, shapes) in runs.items():
                yield f"{op} {name} {label(format)}", op, run, shapes


def tile(format) -> Callable:
    """The product of 16 rows and one weight tile, all in VMEM: decoding and nothing else beside the product."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from kernels_pallas import target, tiles

    def run(x, *weight):
        generation = target.current().generation

        def kernel(x_ref, w_ref, *refs):
            *scales_ref, out_ref = refs if format is None else refs[:-1]
            w = w_ref[...]
            if format is not None:
                tiles.stage_scales(scales_ref[0][...], refs[-1], format, generation, None)
                w = tiles.decoded(w, refs[-1].at[0], format, generation)
            out_ref[...] = jnp.dot(x_ref[...], w, preferred_element_type=jnp.float32)

        staged = (
            [] if format is None else [pltpu.VMEM((1, TILE // 128, TILE // format.block, 128), jnp.uint32)]
        )
        vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
        return pl.pallas_call(
            kernel,
            in_specs=[vmem] * (1 + len(weight)),
            out_specs=vmem,
            out_shape=jax.ShapeDtypeStruct((x.shape[0], TILE), jnp.float32),
            scratch_shapes=staged,
            name="tile",
        )(x, *weight)

    return run


def count(generation: int, only: str, dump: str, table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Bundles and program of each case whose name holds `only`; `table` has those of a run of the same compiler."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from kernels_pallas.target import Target, target

    # Where in the sources a kernel stands is no part of what it is.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    device = topologies.get_topology_desc(TOPOLOGIES[generation], platform="tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    counts = {}
    with target(Target(generation=generation)):
        for name, kernel, run, shapes in cases():
            if only not in name:
                continue
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)
            lowered = jax.jit(run).trace(*shapes).lower(lowering_platforms=("tpu",))
            program = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
            known = table.get(name, {})
            if known.get("program") == program and not any(part in f"{name} " for part in SMALL):
                counts[name] = known
                continue
            shutil.rmtree(dump, ignore_errors=True)
            os.makedirs(dump)
            lowered.compile()
            bundles = sum(
                int(re.search(r"total scheduled bundles:\s*(\d+)", path.read_text()).group(1))
                for path in Path(dump).rglob("*schedule-analysis_final_bundles*")
                if re.match(rf"\d+-{kernel}", path.name)
            )
            counts[name] = {"bundles": bundles, "program": program}
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--generation", type=int, choices=sorted(TOPOLOGIES), action="append")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--all", action="store_true", help="compile what has not changed, too")
    parser.add_argument("--write", action="store_true", help=f"update {TABLE.name}")
    args = parser.parse_args()
    table = json.loads(TABLE.read_text())
    version = importlib.metadata.version("libtpu")
    if args.write and table["libtpu"] != version and (args.only or args.generation):
        parser.error(f"the table is of libtpu {table['libtpu']}, this is {version}: write all of it")
    same = not args.all and table["libtpu"] == version
    with tempfile.TemporaryDirectory() as folder:
        dump = os.path.join(folder, "dump")
        prepare(dump)
        counts = {
            str(generation): count(generation, args.only, dump, table[str(generation)] if same else {})
            for generation in args.generation or sorted(TOPOLOGIES)
        }
    if args.write:
        for generation, found in counts.items():
            table[generation] = {**(table[generation] if args.only else {}), **found}
        table["libtpu"] = version
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
