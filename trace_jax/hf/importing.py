"""A Hugging Face folder as a model of this project."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import NVFP4
from trace_jax.hf.export import packed_mapping
from trace_jax.hf.families import Family, read_config
from trace_jax.hf.folder import CheckpointFormatError, Folder, read_json
from trace_jax.hf.layouts import LAYOUTS
from trace_jax.hf.load import check_tensors, load_arrays
from trace_jax.hf.model import axes_by_path, mapping_of, to_state
from trace_jax.models import ModelConfig, abstract
from trace_jax.parallel import sharding
from trace_jax.quant import is_expert_weight


class Imported(NamedTuple):
    """A checkpoint: its `config.json`, what that says, and the parameters."""

    hf_config: dict[str, Any]
    family: Family
    config: ModelConfig
    params: nnx.State


def read_model_config(path: str | Path) -> tuple[dict[str, Any], Family, ModelConfig]:
    """`config.json` of a folder, as it is and as a model.

    Raises:
        CheckpointFormatError: no such file, an unknown `model_type`, or something that the model does not honour.
    """
    hf_config = read_json(Path(path) / "config.json")
    return hf_config, *read_config(hf_config)


def load_model(
    path: str | Path, *, mesh: jax.sharding.Mesh | None = None, dtype: str = "float32"
) -> Imported:
    """Reads a checkpoint into (sharded) parameters.

    Besides the arrays themselves a host holds a part of one parameter at a time, a fraction of the largest file, and of
    that only what its own devices need.

    Args:
        path: folder with `config.json` and `model.safetensors`, or shards and their index.
        mesh: devices; None is the first device.
        dtype: of the parameters; FP32 for masters.

    Raises:
        CheckpointFormatError: the folder is not complete and consistent; the message names file, tensor or key.
    """
    hf_config, family, config = read_model_config(path)
    if "quantization_config" in hf_config:
        method = hf_config["quantization_config"].get("quant_method")
        raise CheckpointFormatError(
            f"{path} is quantized ({method}); load_quantized reads what this project exports, and masters come "
            "from a BF16 checkpoint."
        )
    mapping = mapping_of(config, family)
    shardings = {
        param: sharding_of(mesh, axes, mapping.shapes[param]) for param, axes in axes_by_path(config).items()
    }
    with Folder(path) as folder:
        check_tensors(folder, mapping, lambda name: name.startswith(family.ignored(config)))
        arrays = load_arrays(folder, mapping, shardings, dict.fromkeys(mapping.shapes, jnp.dtype(dtype)))
    return Imported(hf_config, family, config, to_state(abstract(config)[1], arrays))


def sharding_of(
    mesh: jax.sharding.Mesh | None, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> jax.sharding.Sharding:
    """Sharding by logical axes; the first device without a mesh."""
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return sharding(mesh, axes, shape)


class Quantized(NamedTuple):
    """An NVFP4 export: `config.json`, what that says, and the parameters as a rollout holds them."""

    hf_config: dict[str, Any]
    family: Family
    config: ModelConfig
    rollout: nnx.State


def load_quantized(path: str | Path, *, mesh: jax.sharding.Mesh | None = None) -> Quantized:
    """Reads an NVFP4 export back: experts as FP4 arrays, everything else in BF16.

    Args:
        path: folder in the compressed-tensors or ModelOpt layout.
        mesh: devices; None is the first device.

    Raises:
        CheckpointFormatError: no such layout, an incomplete folder, matrix scales that are not powers of two, or a mesh
            that would cut a block.
    """
    hf_config, family, config = read_model_config(path)
    method = hf_config.get("quantization_config", {}).get("quant_method")
    if method not in LAYOUTS:
        raise CheckpointFormatError(
            f"{path} has quant_method {method!r}; expected one of {', '.join(sorted(LAYOUTS))}."
        )
    layout, axes = LAYOUTS[method], axes_by_path(config)
    packed = frozenset(param for param in axes if is_expert_weight(tuple(param.split("."))))
    mapping = packed_mapping(config, packed, layout)
    shardings, dtypes = {}, {}
    for param, shape in mapping.shapes.items():
        base, _, leaf = param.rpartition(".")
        if base in packed:
            names = axes[base] if leaf != "row_exponent" else axes[base][:-2]
            dtypes[param] = jnp.dtype("uint32" if leaf == "words" else "uint8")
        else:
            names, dtypes[param] = axes[param], jnp.dtype("bfloat16")
        shardings[param] = sharding_of(mesh, names, shape)
    for param in packed:
        _check_blocks(param, shardings[f"{param}.words"], shardings[f"{param}.scales"], mapping.shapes)
    with Folder(path) as folder:
        check_tensors(folder, mapping, lambda name: name.endswith(f".{layout.input_scale}"))
        arrays = load_arrays(folder, mapping, shardings, dtypes)
    for param in packed:
        leaves = {leaf: arrays.pop(f"{param}.{leaf}") for leaf in ("words", "scales", "row_exponent")}
        arrays[param] = Fp4Array(**leaves, format=NVFP4, axis=-2)
    return Quantized(hf_config, family, config, to_state(abstract(config)[1], arrays))


def _check_blocks(
    param: str,
    words: jax.sharding.Sharding,
    scales: jax.sharding.Sharding,
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """A device's part of the words has to be whole blocks: two words a block."""
    part = 8 * words.shard_shape(shapes[f"{param}.words"])[-2]
    if part != NVFP4.block * scales.shard_shape(shapes[f"{param}.scales"])[-2]:
        raise CheckpointFormatError(
            f"the mesh gives a device {part} of the {8 * shapes[f'{param}.words'][-2]} inputs of {param}, which cuts a "
            f"block of {NVFP4.block}; choose a smaller mesh axis, so that every part is a multiple of {NVFP4.block}."
        )
