"""Writes a random checkpoint in several files, or loads it and prints what the process held and how long it took.

    python -m tests.trace_jax.hf.import_memory write DIR [small | qwen3_30b_a3b]
    python -m tests.trace_jax.hf.import_memory load DIR

test_import.py runs it with the small model. The other one is two layers of Qwen3-30B-A3B at full size: 3.7 GB in BF16,
7.3 GB as FP32 masters.
"""

import json
import pathlib
import sys
import time

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from trace_jax.hf import load, load_model, write_config
from trace_jax.hf.folder import INDEX
from trace_jax.hf.model import mapping_of
from trace_jax.models import ModelConfig

MODELS = {
    "small": ModelConfig(
        family="qwen3_moe",
        vocab_size=4096,
        hidden_size=1024,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        num_experts=32,
        expert_hidden_size=512,
    ),
    "qwen3_30b_a3b": ModelConfig(
        family="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        num_layers=2,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        experts_per_token=8,
        expert_hidden_size=768,
    ),
}
FILES = {"small": 2, "qwen3_30b_a3b": 4}


def write(folder: pathlib.Path, model: str = "small") -> None:
    """Random BF16 tensors, about 200 MB or 1 GB a file."""
    folder.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(0).standard_normal(2**23).astype(ml_dtypes.bfloat16)
    tensors = mapping_of(MODELS[model]).tensors
    names, index, files = list(tensors), {}, FILES[model]
    for number in range(files):
        file, part = f"model-{number}.safetensors", names[number::files]
        save_file({name: np.resize(values, tensors[name].shape) for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(write_config(MODELS[model])))


def resident(key: str) -> int:
    """Bytes of this process, by a key of /proc/self/status: VmRSS now, VmHWM at most so far."""
    (line,) = (
        line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


def measure(folder: pathlib.Path) -> dict[str, float]:
    """Bytes of the arrays, of what the process held besides them at most, and of the largest file; seconds of loading.

    The peak is taken for each parameter anew: over all of them, what is held for a moment while the first is loaded
    would hide behind the arrays that come later.
    """
    besides = {}
    load_array = load._load_array

    def watched(folder, mapping, param, *rest):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS again
        before = resident("VmRSS")
        array = jax.block_until_ready(load_array(folder, mapping, param, *rest))
        besides[param] = resident("VmHWM") - before - array.nbytes
        return array

    load._load_array = watched
    jax.numpy.zeros(1).block_until_ready()  # the backend's own memory
    start = time.perf_counter()
    params = jax.block_until_ready(load_model(folder).params)
    worst = max(besides, key=besides.get)
    return {
        "besides": besides[worst],
        "worst": worst,
        "arrays": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "largest": max(path.stat().st_size for path in folder.glob("*.safetensors")),
        "seconds": round(time.perf_counter() - start, 1),
    }


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[2])
    if sys.argv[1] == "write":
        write(folder, *sys.argv[3:])
    else:
        print(json.dumps(measure(folder)))
