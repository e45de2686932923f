"""What `experiments.bench_rollout` measures of the engine: `what=decode`, `profile`, `lengths` and `record`.

Weights are random; for `decode` and `profile` the cache is filled with random entries in the place of a prefill.
"""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.common import method_config
from experiments.decode_profile import kernels_of, summary
from trace_jax.config import ConfigError, check_range
from trace_jax.models import ModelConfig, abstract
from trace_jax.quant import QuantPlan, arranged_for_kernels
from trace_jax.rollout import Engine, EngineConfig, Programs, Request, SamplingConfig, random_rollout_weights
from trace_jax.rollout.capacity import cache_bytes, free_bytes, nbytes, sequences_that_fit
from trace_jax.runs import describe_environment

PLANS = {
    "bf16": None,
    "weights": QuantPlan(kv=False),
    "kv": QuantPlan(experts=False),
    "nvfp4": QuantPlan(),
    "mxfp4": QuantPlan(format="mxfp4"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputConfig:
    """`precisions` of `PLANS`: `weights` and `kv` are NVFP4 of these alone. `steps` are decoded after `context` tokens.

    `batch` 0 takes as many sequences as the device has room for, each with its own pages. `lengths`: sequences of the
    long-tailed distribution, whose median is `median` new tokens. `response`: tokens of each of `slots` sequences that
    are recorded by `methods`, or not, `rounds` times.
    """

    precisions: tuple[str, ...]
    contexts: tuple[int, ...]
    batch: int
    steps: int
    chunk: int
    page_size: int
    lengths: int
    slots: int
    median: int
    methods: tuple[str, ...]
    response: int
    rounds: int

    def __post_init__(self):
        unknown = sorted(set(self.precisions) - set(PLANS))
        if unknown:
            raise ConfigError(f"throughput.precisions has {unknown}; expected some of {sorted(PLANS)}.")
        counts = ("steps", "chunk", "page_size", "lengths", "slots", "median", "response", "rounds")
        check_range("throughput", self, *counts, at_least=1)
        check_range("throughput", self, "batch", at_least=0)

    def engine(self, slots: int, length: int) -> EngineConfig:
        """An engine whose pages hold sequences of `length` tokens in all slots."""
        return EngineConfig(
            slots=slots,
            max_length=length,
            page_size=self.page_size,
            pages=slots * -(-length // self.page_size),
            chunk=self.chunk,
            buckets=(self.page_size,),
            host_bytes=2**62,
        )


def decode_rows(config: ThroughputConfig, model: ModelConfig, seed: int) -> Iterator[dict[str, Any]]:
    """One row of the table for each precision and context: tokens a second of decoding, the batch, and memory."""
    for engine, about in _full_engines(config, model, seed):
        start = time.perf_counter()
        for _ in engine.run():
            pass
        seconds = time.perf_counter() - start
        sampled, m = engine.meter.sampled, engine.meter.metrics()
        plan = engine.programs.plan
        token, sequence = cache_bytes(model, None if plan is None else plan.kv_format)
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        yield {
            **about,
            "tokens/s": round(sampled / seconds, 1),
            "ms a step": round(1e3 * seconds * engine.config.slots / sampled, 3),
            "decode share": round(m["engine/decode_share"], 3),
            "cache GB": round(engine.config.slots * (about["context"] * token + sequence) / 1e9, 2),
            "peak GB": round(peak / 1e9, 2),
        }


def profile_rows(config: ThroughputConfig, model: ModelConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Kernels of one chunk of decode steps for each precision and context."""
    for engine, about in _full_engines(config, model, seed):
        for row in summary(kernels_of(engine.step), config.chunk):
            yield {**about, **row}


def _full_engines(
    config: ThroughputConfig, model: ModelConfig, seed: int
) -> Iterator[tuple[Engine, dict[str, Any]]]:
    """An engine for each precision and context whose cache is full, after a first chunk; and what to say of it."""
    for precision in config.precisions:
        plan = PLANS[precision]
        kv_format, params = None if plan is None else plan.kv_format, _weights(model, plan, seed)
        for context in config.contexts:
            length = context + config.steps + 1
            sizes = {"length": length, "page_size": config.page_size}
            batch = config.batch or sequences_that_fit(
                model, kv_format, **sizes, budget=free_bytes(jax.local_devices()[0])
            )
            programs = Programs(abstract(model)[0], model, config.engine(batch, length), plan=plan)
            with Engine(programs) as engine:
                engine.sync(params, 0)
                rng = np.random.default_rng(seed)
                sampling = SamplingConfig(max_new_tokens=config.steps + 1)
                for n in range(batch):
                    prompt = rng.integers(0, model.vocab_size, context)
                    engine.submit(Request(prompt=prompt, sampling=sampling, seeds=(n,)))
                engine.skip_prefill(lambda cache: random_cache(cache, seed))
                engine.step()
                engine.meter.reset()
                weights = round(nbytes(params) / 1e9, 2)
                yield (
                    engine,
                    {"precision": precision, "context": context, "batch": batch, "weights GB": weights},
                )
        del params


def _weights(model: ModelConfig, plan: QuantPlan | None, seed: int) -> nnx.State:
    """Random ones as kernels read them.

    In one program, so that they are there once and lie close together: two halves of a cache fill the rest.
    """
    weights = jax.jit(lambda key: arranged_for_kernels(random_rollout_weights(model, plan, key)))
    return weights(jax.random.key(seed))


def length_rows(config: ThroughputConfig, model: ModelConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Continuous against static batches on lengths with a long tail: log-normal, at most 16 times the median.

    Static: as many sequences as slots begin together, and the next ones when all of them have ended. The engine is the
    same, and so are the requests.
    """
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.standard_normal(config.lengths))
    new = np.clip(np.round(config.median * spread), 1, 16 * config.median).astype(int)
    prompts = [rng.integers(0, model.vocab_size, config.page_size) for _ in range(config.lengths)]
    length = config.page_size + 16 * config.median
    for precision in config.precisions:
        plan = PLANS[precision]
        weights = _weights(model, plan, seed)
        engine_config = config.engine(config.slots, length)
        programs = Programs(abstract(model)[0], model, engine_config, plan=plan)
        requests = [
            Request(prompt=prompt, sampling=SamplingConfig(max_new_tokens=int(n)), seeds=(i,))
            for i, (prompt, n) in enumerate(zip(prompts, new, strict=True))
        ]
        times = {}
        for name, size in (
            ("warm-up", config.slots),
            ("continuous", config.lengths),
            ("static", config.slots),
        ):
            with Engine(programs) as engine:
                engine.sync(weights, 0)
                chosen = requests[: config.slots] if name == "warm-up" else requests
                start = time.perf_counter()
                for first in range(0, len(chosen), size):
                    for _ in engine.run(chosen[first : first + size]):
                        pass
                times[name] = time.perf_counter() - start
                occupancy = engine.meter.metrics()["engine/slot_occupancy"]
            if name != "warm-up":
                yield {
                    "precision": precision,
                    "batching": name,
                    "tokens/s": round(new.sum() / times[name], 1),
                    "seconds": round(times[name], 2),
                    "slot occupancy": round(occupancy, 3),
                    "over static": round(times["static"] / times["continuous"], 3)
                    if name == "static"
                    else "",
                }


def record_rows(config: ThroughputConfig, model: ModelConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Tokens a second with a record beside the same rollout without, in turns, and the record's bytes a token."""
    length = config.page_size + config.response
    chosen = {name: method_config(name) for name in config.methods}
    plan = next(iter(chosen.values())).rollout_plan()
    weights = _weights(model, plan, seed)
    engine_config = config.engine(config.slots, length)
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, model.vocab_size, (config.slots, config.page_size))

    def requests(new: int) -> list[Request]:
        sampling = SamplingConfig(max_new_tokens=new)
        return [Request(prompt=prompt, sampling=sampling, seeds=(n,)) for n, prompt in enumerate(prompts)]

    specs = {"none": None} | {name: method.record_spec(model) for name, method in chosen.items()}
    programs = {
        name: Programs(abstract(model)[0], model, engine_config, plan=plan, record=spec)
        for name, spec in specs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in specs}
    row_bytes = {}
    for number in range(-1, config.rounds):
        for name in specs:
            with Engine(programs[name]) as engine:
                engine.sync(weights, 0)
                row_bytes[name] = engine.row_bytes
                start = time.perf_counter()
                for _ in engine.run(requests(config.response if number >= 0 else 2 * config.chunk)):
                    pass
                if number >= 0:
                    seconds[name].append(time.perf_counter() - start)
    tokens = config.slots * config.response
    for name in specs:
        mean = float(np.mean(seconds[name]))
        yield {
            "record": name,
            "tokens/s": round(tokens / mean, 1),
            "of none": round(float(np.mean(seconds["none"])) / mean, 4),
            "bytes a token": row_bytes[name] - row_bytes["none"],
            "routes and hash, bytes": row_bytes["none"],
            "slots": config.slots,
            "response": config.response,
        }


def random_cache(cache: dict[str, Any], seed: int) -> dict[str, Any]:
    """The cache with random entries: codes, scales around one, or BF16 numbers."""

    def fill(path, leaf, key):
        name = str(path[-1])
        if leaf.dtype == jnp.uint32:
            return jax.random.bits(key, leaf.shape, jnp.uint32)
        if "scales" in name:
            return jnp.full(leaf.shape, 0x38, jnp.uint8)  # 1 in E4M3, 2^-71 in E8M0
        if leaf.dtype == jnp.uint8:
            return jnp.full(leaf.shape, 127, jnp.uint8)
        return jax.random.normal(key, leaf.shape, jnp.float32).astype(leaf.dtype)

    key = jax.random.key(seed)

    def fill_layers(path, leaf):
        """A layer at a time: random bits take as much again while they are made."""
        of_layer = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        return jax.lax.map(lambda key: fill(path, of_layer, key), jax.random.split(key, leaf.shape[0]))

    # In place, so the cache is an argument although its entries do not matter.
    filled = jax.jit(
        lambda cache: jax.tree_util.tree_map_with_path(fill_layers, cache), donate_argnums=0, keep_unused=True
    )
    return filled(cache)


WHAT = {"decode": decode_rows, "profile": profile_rows, "lengths": length_rows, "record": record_rows}


def measure(what: str, config: ThroughputConfig, model: ModelConfig, seed: int, out: Path) -> str:
    """Appends a run to `<out>/bench_rollout_<what>.json`, row by row, and writes `.md` of all; returns the Markdown.

    Large caches need a process each: what one leaves of the device's memory is in pieces.
    """
    out.mkdir(parents=True, exist_ok=True)
    path, rows = out / f"bench_rollout_{what}.json", []
    earlier = json.loads(path.read_text()) if path.exists() else []
    command = shlex.join(["python", "-m", "experiments.bench_rollout", *sys.argv[1:]])
    run = {"command": command, "environment": describe_environment(), "rows": rows}
    for row in WHAT[what](config, model, seed):
        rows.append(row)
        print(json.dumps(row), flush=True)
        path.write_text(json.dumps([*earlier, run], indent=1) + "\n")
        path.with_suffix(".md").write_text(text := report([*earlier, run]))
    return text


def report(runs: list[dict[str, Any]]) -> str:
    """A table of all rows, and where each run's are from."""
    lines = []
    for run in runs:
        devices, packages = run["environment"]["devices"], run["environment"]["packages"]
        where = f"{devices['count']} x {devices['kind']}, JAX {packages['jax']}"
        lines.append(f"- `{run['command']}` on {where}: {len(run['rows'])} rows.")
    return table([row for run in runs for row in run["rows"]]) + "\n\n" + "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows)])
