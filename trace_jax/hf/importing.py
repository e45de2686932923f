"""A Hugging Face folder as a model of this project."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trace_jax.hf.families import Family, read_config
from trace_jax.hf.folder import CheckpointFormatError, Folder, read_json
from trace_jax.hf.load import check_tensors, load_arrays
from trace_jax.hf.model import axes_by_path, mapping_of, to_state
from trace_jax.models import ModelConfig, abstract
from trace_jax.parallel import sharding


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

    Besides the arrays themselves a host holds one layer of one parameter at a time, in the dtype of the file, and of
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
        check_tensors(folder, mapping, family.ignored)
        arrays = load_arrays(folder, mapping, shardings, dict.fromkeys(mapping.shapes, jnp.dtype(dtype)))
    return Imported(hf_config, family, config, to_state(abstract(config)[1], arrays))


def sharding_of(
    mesh: jax.sharding.Mesh | None, axes: tuple[str, ...], shape: tuple[int, ...]
) -> jax.sharding.Sharding:
    """Sharding by logical axes; the first device without a mesh."""
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return sharding(mesh, axes, shape)
