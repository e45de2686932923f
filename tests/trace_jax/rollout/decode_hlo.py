"""Compiles a decode chunk of a small model for a TPU or GPU that is not there: prints what is as large as a layer.

    python -m tests.trace_jax.rollout.decode_hlo tpu|gpu|here [--bf16]

Of the engine, whose cache is paged; in NVFP4 with a record, or in BF16. `here` is this machine's own accelerator.
Prints JSON: `least`, the bytes of the smallest array of one layer, experts or cache; `kernels`, how often the decode
loop calls each; `large`, every instruction that leaves an array of at least `least` bytes (operation and shape), but
for what names, groups or passes on other arrays, and for kernels that write the cache in place; apart those outside all
loops. Needs a process of its own, and libtpu (`pip install .[tpu]`) or jax-triton, triton and the plugin of JAX for
CUDA, which compiles without a driver.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A layer's packed arrays, the smallest of which are scales of `down` (32 x 24 x 512 bytes), are larger than the dense
# weights of its attention (512 x 256 in BF16) and than all activations; a stack of them need not fit VMEM to be left.
MODEL = {
    "vocab_size": 256,
    "hidden_size": 512,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "experts_per_token": 2,
    "expert_hidden_size": 384,
}
DATA = Path(__file__).resolve().parents[2] / "data"
SLOTS, LENGTH, CHUNK, PAGE = 8, 24576, 4, 128
PASSED_ON = ("parameter", "get-tuple-element", "tuple", "bitcast", "while")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


class Instruction(NamedTuple):
    computation: str
    operation: str
    shapes: tuple[str, ...]
    bytes: int  # of its largest array
    line: str


def instructions(hlo: str) -> Iterator[Instruction]:
    """Of a compiled module's text, without those inside fusions, whose arrays are not in memory."""
    computation = ""
    for line in hlo.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            computation = "ENTRY" if header.group(1) else header.group(2)
        elif found := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(", line):
            shapes = re.findall(r"\b(\w+)\[([\d,]*)\]", found.group(1))
            sizes = [BYTES.get(t, 8) * math.prod(map(int, filter(None, n.split(",")))) for t, n in shapes]
            if "fused_computation" not in computation:
                names = tuple(f"{t}[{n}]" for t, n in shapes)
                yield Instruction(computation, found.group(2), names, max(sizes, default=0), line)


def gpu_device():
    """An H200 that is not there, and kernels chosen as on one."""
    import jax_triton
    from jax.experimental import topologies

    from kernels_pallas import implementations, triton_bridge

    implementations.backend = lambda: "gpu"
    triton_bridge.unavailable = lambda: None
    jax_triton.triton_lib.triton_kernel_call_lib.get_compute_capability = lambda device: 90
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        topology="1x1x1",
        target_config=(DATA / "h200_target.txtpb").read_text(),
    ).devices[0]


def compiled(platform: str, *, bf16: bool) -> tuple[str, int]:
    """The optimised HLO of a decode chunk, and the bytes of the smallest array of a layer's experts and cache."""
    import jax
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from kernels_pallas.target import Target, target
    from trace_jax.guidance import GuidanceSpec
    from trace_jax.models import ModelConfig, abstract
    from trace_jax.quant import QuantPlan, arranged_for_kernels, rollout_weights
    from trace_jax.quant.weights import is_expert_weight
    from trace_jax.rollout import EngineConfig, Programs
    from trace_jax.rollout.programs import Slots

    device = gpu_device() if platform == "gpu" else None  # before anything is traced
    model, plan = ModelConfig(**MODEL), None if bf16 else QuantPlan()
    graphdef, masters = abstract(model)
    record = None if bf16 else GuidanceSpec(layers=(2, 3))
    params = jax.eval_shape(
        lambda masters: arranged_for_kernels(rollout_weights(masters, plan, model.dtype)), masters
    )
    config = EngineConfig(
        slots=SLOTS, max_length=LENGTH, pages=SLOTS * (LENGTH // PAGE), page_size=PAGE, chunk=CHUNK
    )
    programs = Programs(graphdef, model, config, plan=plan, record=record)
    cache = jax.eval_shape(programs.init_cache)
    decode = functools.partial(Programs.decode.trace, programs, plain=True)
    inputs = params, cache, Slots.empty(config.slots, config.pages_per_sequence, 2)
    if platform == "here":
        lowered = decode(*inputs).lower()
    else:
        device = device or topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
        place = SingleDeviceSharding(device)
        inputs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), inputs)
        with contextlib.nullcontext() if platform == "gpu" else target(Target(generation=5)):
            lowered = decode(*inputs).lower(lowering_platforms=("cuda" if platform == "gpu" else "tpu",))
    flat = dict(nnx.to_flat_state(params))
    arrays = jax.tree.leaves(([v for path, v in flat.items() if is_expert_weight(path)], cache["attention"]))
    # Row scales of weights are a handful of numbers.
    sizes = [a.size * a.dtype.itemsize // MODEL["num_layers"] for a in arrays if a.ndim > 2]
    return lowered.compile().as_text(), min(sizes)


def report(hlo: str, least: int) -> dict:
    """See the module."""
    found = {"least": least, "kernels": {}, "large": [], "large_outside_loops": []}
    for i in instructions(hlo):
        # Triton's calls are nameless.
        kernel = re.search(
            r'op_name="[^"]*/(\w+)/pallas_call"|custom_call_target="(triton)_kernel_call_ffi"', i.line
        )
        if i.operation == "custom-call" and kernel:
            name = kernel.group(1) or kernel.group(2)
            found["kernels"][name] = found["kernels"].get(name, 0) + 1
            if "output_to_operand_aliasing" in i.line:
                continue
        if i.bytes >= least and i.operation not in PASSED_ON:
            outside = i.computation == "ENTRY"
            found["large_outside_loops" if outside else "large"].append(f"{i.operation} {' '.join(i.shapes)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", choices=("tpu", "gpu", "here"))
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    platform = arguments.platform
    if platform != "here":
        os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    print(json.dumps(report(*compiled(platform, bf16=arguments.bf16))))


if __name__ == "__main__":
    main()
