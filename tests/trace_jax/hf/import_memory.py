"""Run by test_import.py: writes a checkpoint in several files, or loads it and prints what the process held."""

import json
import pathlib
import sys

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from trace_jax.hf import load_model, write_config
from trace_jax.hf.folder import INDEX
from trace_jax.hf.model import mapping_of
from trace_jax.models import ModelConfig

MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=4096,
    hidden_size=1024,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    num_experts=32,
    expert_hidden_size=512,
)
FILES = 2


def write(folder: pathlib.Path) -> None:
    """Random BF16 tensors, about 200 MB a file."""
    values = np.random.default_rng(0).standard_normal(2**23).astype(ml_dtypes.bfloat16)
    tensors = mapping_of(MODEL).tensors
    names, index = list(tensors), {}
    for number in range(FILES):
        file, part = f"model-{number}.safetensors", names[number::FILES]
        save_file(
            {n: values[: np.prod(tensors[n].shape)].reshape(tensors[n].shape) for n in part}, folder / file
        )
        index |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(write_config(MODEL)))


def resident(key: str) -> int:
    """Bytes of this process, by a key of /proc/self/status: VmRSS now, VmHWM at most so far."""
    (line,) = (
        line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


def measure(folder: pathlib.Path) -> dict[str, int]:
    jax.numpy.zeros(1).block_until_ready()  # the backend's own memory
    before = resident("VmRSS")
    params = load_model(folder).params
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"besides": resident("VmHWM") - before - arrays, "arrays": arrays, "largest": largest}


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[2])
    if sys.argv[1] == "write":
        write(folder)
    else:
        print(json.dumps(measure(folder)))
