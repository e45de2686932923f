"""A Hugging Face folder as a model of this project."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import ROW_EXPONENT_BIAS, Fp4Format
from trace_jax.config import read_json
from trace_jax.hf.export import packed_mapping
from trace_jax.hf.families import Family, read_config
from trace_jax.hf.folder import CheckpointFormatError, Folder
from trace_jax.hf.layouts import MXFP4_BLOCKS, layout_of
from trace_jax.hf.load import check_tensors, load_arrays
from trace_jax.hf.model import axes_by_path, is_kept_wide, mapping_of, shapes_by_path, to_state
from trace_jax.models import ModelConfig, abstract
from trace_jax.parallel import sharding
from trace_jax.quant import is_expert_weight


class Imported(NamedTuple):
    """A checkpoint: its `config.json`, what that says, and the parameters."""

    hf_config: dict[str, Any]
    family: Family
    config: ModelConfig
    params: nnx.State


def is_hf_folder(path: str | Path | None) -> bool:
    """Whether a folder has a `config.json`, which run folders do not have."""
    return path is not None and (Path(path) / "config.json").is_file()


def read_model_config(path: str | Path) -> tuple[dict[str, Any], Family, ModelConfig]:
    """`config.json` of a folder, as it is and as a model.

    Raises:
        CheckpointFormatError: no such file, an unknown `model_type`, or something that the model does not honour.
    """
    hf_config = read_json(Path(path) / "config.json", CheckpointFormatError)
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
        dtype: of the parameters, but for those that rollouts keep in FP32; FP32 for masters.

    MXFP4 checkpoints of gpt-oss, which have no other original, are dequantized on the way, block by block.

    Raises:
        CheckpointFormatError: the folder is not complete and consistent; the message names file, tensor or key.
    """
    hf_config, family, config = read_model_config(path)
    shapes, axes = shapes_by_path(config), axes_by_path(config)
    quantized = bool(hf_config.get("quantization_config"))
    if quantized and layout_of(hf_config, path) != MXFP4_BLOCKS:
        method = hf_config["quantization_config"].get("quant_method")
        raise CheckpointFormatError(
            f"{path} is quantized ({method}); load_quantized reads what this project exports, and masters come "
            "from a BF16 checkpoint."
        )
    shardings = {param: sharding_of(mesh, axes[param], shape) for param, shape in shapes.items()}
    with Folder(path) as folder:
        if quantized:
            mapping = packed_mapping(config, _experts(shapes), MXFP4_BLOCKS, folder.names)
        else:
            mapping = mapping_of(config, folder.names)
        check_tensors(folder, mapping, lambda name: name.startswith(family.ignored(config)))
        dtypes = {param: jnp.dtype("float32" if is_kept_wide(param) else dtype) for param in shapes}
        arrays = load_arrays(folder, mapping, shapes, shardings, dtypes)
    return Imported(hf_config, family, config, to_state(abstract(config)[1], arrays))


def sharding_of(
    mesh: jax.sharding.Mesh | None, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> jax.sharding.Sharding:
    """Sharding by logical axes; the first device without a mesh."""
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return sharding(mesh, axes, shape)


class Quantized(NamedTuple):
    """An FP4 checkpoint: `config.json`, what that says, and the parameters as a rollout holds them."""

    hf_config: dict[str, Any]
    family: Family
    config: ModelConfig
    rollout: nnx.State


def load_quantized(path: str | Path, *, mesh: jax.sharding.Mesh | None = None) -> Quantized:
    """Reads an FP4 checkpoint as rollouts hold it (`quant.rollout_weights`): experts as FP4 arrays, the rest in BF16.

    Codes and scales are those of the folder, but for -0 (code 8) of MXFP4 checkpoints, which becomes 0.

    Args:
        path: an NVFP4 export in the compressed-tensors or ModelOpt layout, or gpt-oss in MXFP4.
        mesh: devices; None is the first device.

    Raises:
        CheckpointFormatError: no such layout, an incomplete folder, matrix scales that are not powers of two, or a mesh
            that would cut a block.
    """
    hf_config, family, config = read_model_config(path)
    layout, axes = layout_of(hf_config, path), axes_by_path(config)
    packed = _experts(axes)
    with Folder(path) as folder:
        mapping = packed_mapping(config, packed, layout, folder.names)
        shardings, dtypes = {}, {}
        for param, shape in mapping.shapes.items():
            base, _, leaf = param.rpartition(".")
            if base in packed:
                names = axes[base] if leaf != "row_exponent" else axes[base][:-2]
                dtypes[param] = jnp.dtype("uint32" if leaf == "words" else "uint8")
            else:
                names, dtypes[param] = (
                    axes[param],
                    jnp.dtype("float32" if is_kept_wide(param) else "bfloat16"),
                )
            shardings[param] = sharding_of(mesh, names, shape)
        for param in packed:
            words, scales = (shardings[f"{param}.{leaf}"] for leaf in ("words", "scales"))
            _check_blocks(param, layout.format, words, scales, mapping.shapes)
        check_tensors(folder, mapping, layout.ignores)
        arrays = load_arrays(folder, mapping, mapping.shapes, shardings, dtypes)
    for param in packed:
        leaves = {leaf: arrays.pop(f"{param}.{leaf}", None) for leaf in ("words", "scales", "row_exponent")}
        if leaves["row_exponent"] is None:  # 2^0: the format has block scales only
            shape = mapping.shapes[f"{param}.words"][:-2]
            one = np.full(shape, ROW_EXPONENT_BIAS, np.uint8)
            leaves["row_exponent"] = jax.device_put(one, sharding_of(mesh, axes[param][:-2], shape))
        arrays[param] = Fp4Array(**leaves, format=layout.format, axis=-2)
    return Quantized(hf_config, family, config, to_state(abstract(config)[1], arrays))


def _experts(params: Iterable[str]) -> frozenset[str]:
    return frozenset(param for param in params if is_expert_weight(tuple(param.split("."))))


def _check_blocks(
    param: str,
    format: Fp4Format,
    words: jax.sharding.Sharding,
    scales: jax.sharding.Sharding,
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """A device's part of the words has to be whole blocks."""
    part = 8 * words.shard_shape(shapes[f"{param}.words"])[-2]
    if part != format.block * scales.shard_shape(shapes[f"{param}.scales"])[-2]:
        raise CheckpointFormatError(
            f"the mesh gives a device {part} of the {8 * shapes[f'{param}.words'][-2]} inputs of {param}, which cuts a "
            f"block of {format.block}; choose a smaller mesh axis, so that every part is a multiple of {format.block}."
        )
