"""Every kernel beside its baselines, in one run, at shapes of real models; or, with --list, what runs here and why.

    python -m experiments.bench_kernels --list
    python -m experiments.bench_kernels [--group matmul|grouped_matmul|decode_attention|prefill|rounding] [--out DIR]

A program calls an op many times; shown is what many calls take longer than `FEW`, over the difference, the median of
rounds in which kernel and baselines take turns. Times are compared within one run only.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernel_cases import KERNEL_GROUPS, Case, Run, normal
from experiments.kernel_list import describe
from experiments.prefill_cases import prefill_cases
from experiments.rounding_cases import rounding_cases
from trace_jax.runs import describe_environment

FEW = 2
MANY = (14, 64)  # calls at least and at most
LONG = 5e3  # microseconds that they shall take: several times what the host's start of a program varies
ROUNDS, SECONDS = (11, 41), 0.5  # rounds at least and at most, and time for those that are not needed
UNCACHED = 2**28  # bytes that calls must read between two reads of the same: several times a GPU's cache
# Without CUDA graphs, whose update for buffers that moved would count as time of a call.
ONE_BY_ONE = {"xla_gpu_graph_min_graph_size": "1000000"}
MOST_COPIED = 2**30  # bytes of first arguments beyond which a program has no more calls than the least
MOST = 2.0  # times a copy's bandwidth, that an op may reach by what its inputs have in a cache
GROUPS = {**KERNEL_GROUPS, "rounding": rounding_cases, "prefill": prefill_cases}


def many(run: Run, carried: bool) -> Run:
    """A program of as many calls as it is given first arguments; they take the others in turns from `rests`.

    Its result is one number made of one element of every array that a call returns: arrays that leave a program take
    the host microseconds each, and what nothing reads the compiler drops. Barriers before a call keep XLA from making
    one product of several with the same weights, those after it from computing the one element alone. `carried`: a
    call's result is the next one's first argument, whose buffer it may take, and the last one is returned.
    """

    def calls(firsts: list[Any], rests: list[tuple[Any, ...]]) -> Any:
        result, seen = None, []
        for i, first in enumerate(firsts):
            rest = rests[i % len(rests)]
            if carried:
                result = run(first if result is None else result, *rest)
                continue
            result = jax.lax.optimization_barrier(run(*jax.lax.optimization_barrier((first, *rest))))
            seen += [leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(result)]
        return result if carried else jnp.stack(seen).sum()

    return jax.jit(calls, donate_argnums=0 if carried else (), compiler_options=ONE_BY_ONE)


class Program:
    """One op, called `FEW` and `count` times in a program: what more calls take longer is time of the device alone."""

    def __init__(self, run: Run, arguments: tuple[Any, ...], carried: bool = False, count: int = MANY[0]):
        first, *rest = arguments
        self.carried, self.count = carried, count
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(rest))
        # In a model a layer's weights and entries are read once, and other layers' before they are again.
        copies = min(count, -(-UNCACHED // max(size, 1)))
        self.rests = [tuple(rest), *(jax.tree.map(jnp.copy, tuple(rest)) for _ in range(copies - 1))]
        # Of what is carried only the first is read; the others are there to be counted.
        others = [None if carried else jax.tree.map(jnp.copy, first) for _ in range(count - 1)]
        self.firsts = [first, *others]
        self.run = many(run, carried)
        for calls in (FEW, count):
            self.seconds(calls)

    def seconds(self, count: int) -> float:
        start = time.perf_counter()
        result = jax.block_until_ready(self.run(self.firsts[:count], self.rests))
        elapsed = time.perf_counter() - start
        if self.carried:
            self.firsts[0] = result
        return elapsed

    def sample(self) -> float:
        return (self.seconds(self.count) - self.seconds(FEW)) / (self.count - FEW)


class Copies(Program):
    """The driver's copies of `x`, which leave the program as they came: nothing of theirs can be dropped."""

    def __init__(self, x: jax.Array):
        self.carried, self.rests, self.count = False, [], MANY[0]
        self.firsts = [jnp.copy(x) for _ in range(self.count)]
        self.run = jax.jit(lambda firsts, rests: [jax.lax.optimization_barrier(a) for a in firsts])
        for calls in (FEW, self.count):
            self.seconds(calls)


def timed(programs: Mapping[str, Program]) -> dict[str, float]:
    """Microseconds a call of each program, medians over rounds in which they take turns."""
    samples: dict[str, list[float]] = {name: [] for name in programs}
    start = time.perf_counter()
    for done in range(ROUNDS[1]):
        if done >= ROUNDS[0] and time.perf_counter() - start > SECONDS:
            break
        for name, program in programs.items():
            samples[name].append(program.sample())
    return {name: float(np.median(values)) * 1e6 for name, values in samples.items()}


def copy_bandwidth() -> float:
    """Bytes a microsecond, read and written, of a GiB: by the faster of an elementwise pass and the driver's copy."""
    x = normal(2**29)
    times = timed({"pass": Program(lambda x: x * jnp.bfloat16(1.5), (x,)), "copy": Copies(x)})
    if not 0 < max(times.values()) < MOST * min(times.values()):
        raise RuntimeError(f"a copy and a pass took {times} us: the compiler dropped one of them.")
    return 2 * x.nbytes / min(times.values())


def calls(case: Case, first: Any, bandwidth: float) -> int:
    """How many calls a program of `case` makes, each with a copy of `first`, its first argument."""
    least, most = MANY
    if not case.carried:  # there is only one first argument
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
        most = max(least, min(most, MOST_COPIED // size))
    return int(np.clip(LONG * bandwidth / case.bytes, least, most)) if case.bytes else least


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    """One row of the table as JSON: times in microseconds, the ratio that counts, and whether it is kept."""
    row: dict[str, Any] = {"op": case.op, "shape": case.shape, "must": case.must, "aim": case.aim}
    arguments = case.arguments()
    other = arguments if case.baseline_arguments is None else case.baseline_arguments()
    count = calls(case, arguments[0], bandwidth)
    programs = {"ours": Program(case.ours, arguments, case.carried, count)}
    for name, run in case.baselines.items():
        try:
            programs[name] = Program(run, other, case.carried, count)
        except Exception as error:  # a baseline that this machine lacks is shown as such
            row.setdefault("without", {})[name] = str(error).splitlines()[0][:200]
    times = timed(programs)
    floor = case.bytes / (MOST * bandwidth) if case.bytes else 0.0
    if min(times.values()) <= 0 or times["ours"] < floor:
        raise RuntimeError(
            f"{case.op} {case.shape} took {times} us, less than its {case.bytes} bytes can: the compiler dropped calls."
        )
    row["us"] = {name: round(us, 1) for name, us in times.items()}
    if case.bytes:
        row["bandwidth_share"] = round(case.bytes / times["ours"] / bandwidth, 3)
    if case.bandwidth:
        row["ratio"] = row["bandwidth_share"]
    elif len(times) > 1:
        row["ratio"] = round(min(us for name, us in times.items() if name != "ours") / times["ours"], 3)
    if case.must is not None and "ratio" in row:
        row["verdict"] = "aim" if row["ratio"] >= (case.aim or np.inf) else "must"
        if row["ratio"] < case.must:
            row["verdict"] = "missed"
    return row


def table(rows: list[dict[str, Any]], bandwidth: float) -> str:
    """Markdown."""
    lines = [
        f"copy: {bandwidth / 1e6:.2f} TB/s read and written; ratios of bandwidth are shares of it, others are the "
        "fastest baseline's time over ours",
        "",
        "| op | shape | ours, us | baselines, us | ratio | must | aim | | share of copy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        others = ", ".join(f"{name} {us}" for name, us in row["us"].items() if name != "ours")
        cells = [row["op"], row["shape"], row["us"]["ours"], others]
        cells += ["" if row.get(name) is None else round(row[name], 3) for name in ("ratio", "must", "aim")]
        cells += [row.get("verdict", ""), row.get("bandwidth_share", "")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", action="store_true", help="print which implementation serves each op, and why"
    )
    parser.add_argument("--group", choices=sorted(GROUPS), action="append", help="only these; all by default")
    parser.add_argument("--match", default="", help="only cases whose op and shape contain this")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_kernels"))
    arguments = parser.parse_args()
    if arguments.list:
        print(describe())
        return
    if jax.default_backend() != "gpu":
        sys.exit(
            f"the benchmark needs a GPU, the default backend is {jax.default_backend()}; --list says what runs here."
        )
    bandwidth = copy_bandwidth()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for group in arguments.group or GROUPS:
        for case in GROUPS[group]():
            if arguments.match not in f"{case.op} {case.shape}":
                continue
            rows.append(measure(case, bandwidth))
            print(json.dumps(rows[-1]), flush=True)
            result = {
                "command": " ".join(["python -m experiments.bench_kernels", *sys.argv[1:]]),
                "environment": describe_environment(),
                "copy_tb_per_s": bandwidth / 1e6,
                "rows": rows,
            }
            (arguments.out / "bench_kernels.json").write_text(json.dumps(result, indent=1, default=str))
            (arguments.out / "bench_kernels.md").write_text(table(rows, bandwidth) + "\n")
    print(table(rows, bandwidth))


if __name__ == "__main__":
    main()
