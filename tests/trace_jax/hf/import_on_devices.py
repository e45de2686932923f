"""Run by test_import.py on 8 virtual devices: what arrives where, and what a mesh may not do."""

import json
import sys

import jax
import numpy as np

from trace_jax.hf import COMPRESSED_TENSORS, CheckpointFormatError, export_nvfp4, load_model, load_quantized
from trace_jax.hf.model import by_path
from trace_jax.parallel import MeshConfig, make_mesh
from trace_jax.quant import QuantPlan, rollout_weights


def refused(folder: str) -> str:
    try:
        load_quantized(folder, mesh=make_mesh(MeshConfig(tensor=4)))
    except CheckpointFormatError as error:
        return str(error)
    return ""


def main(folder: str, gpt_oss: str, out: str) -> dict:
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    whole, sharded = load_model(folder), load_model(folder, mesh=mesh)
    pairs = zip(jax.tree.leaves(whole.params), jax.tree.leaves(sharded.params), strict=True)
    gate_up = by_path(sharded.params)["moe.gate_up"]
    rollout = jax.jit(rollout_weights, static_argnums=(1, 2))(whole.params, QuantPlan(), "bfloat16")
    export_nvfp4(rollout, whole.config, QuantPlan(), COMPRESSED_TENSORS, out)
    packed = load_quantized(out, mesh=mesh)
    packed_pairs = zip(jax.tree.leaves(rollout), jax.tree.leaves(packed.rollout), strict=True)
    blocks = {
        "whole": load_model(gpt_oss),
        "sharded": load_model(gpt_oss, mesh=make_mesh(MeshConfig(fsdp=4))),
    }
    block_pairs = zip(*(jax.tree.leaves(loaded.params) for loaded in blocks.values()), strict=True)
    return {
        "equal": all(np.array_equal(a, b) for a, b in pairs),
        "spec": list(gate_up.sharding.spec),
        "shard": gate_up.addressable_shards[0].data.shape,
        "whole": gate_up.shape,
        "packed_equal": all(np.array_equal(a, b) for a, b in packed_pairs),
        "blocks_equal": all(np.array_equal(a, b) for a, b in block_pairs),
        "blocks_shard": by_path(blocks["sharded"].params)["moe.gate_up"].addressable_shards[0].data.shape,
        "cut": [refused(path) for path in (out, gpt_oss)],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
