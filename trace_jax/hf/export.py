"""A model of this project as a Hugging Face folder: BF16, or FP4 experts for serving engines."""

import json
import shutil
from collections.abc import Collection
from collections.abc import Mapping as Maps
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from kernels_pallas.arrays import Fp4Array
from trace_jax.config import read_json
from trace_jax.hf.checks import check_finite, check_input_scales, check_packed
from trace_jax.hf.codecs import PLAIN
from trace_jax.hf.families import family_of, write_config
from trace_jax.hf.folder import CheckpointFormatError
from trace_jax.hf.layouts import MXFP4_BLOCKS, BlockLayout, Layout
from trace_jax.hf.model import by_path, layers_of, mapping_of, repeated_head, shapes_by_path
from trace_jax.hf.quantization import (
    modelopt_file,
    mxfp4_config,
    mxfp4_readme,
    quantization_config,
    readme,
)
from trace_jax.hf.save import MAX_FILE_BYTES, copied_files, new_folder, save_tensors
from trace_jax.hf.table import Mapping
from trace_jax.models import ModelConfig
from trace_jax.quant import DOWN_INPUT, EXPERT_INPUT, QuantPlan


def export_bf16(
    params: nnx.State,
    config: ModelConfig,
    out: str | Path,
    *,
    source: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the model as its family's folder, rounded to BF16.

    Args:
        params: masters, or BF16 parameters.
        config: the model.
        out: a folder that does not exist, or is empty.
        source: folder that the model came from: its `config.json` is kept where it says the same, and its tokenizer.
        max_file_bytes: larger models have several files and an index.

    Raises:
        CheckpointFormatError: a family without such a layout, values that BF16 cannot hold, or an unusable `out`.
    """
    mapping, values = mapping_of(config), by_path(params)
    check_finite(mapping, values)
    with new_folder(out) as folder:
        save_tensors(folder, mapping, values, {}, max_file_bytes)
        _write_files(folder, _config(config, source), source)


def export_nvfp4(
    rollout: nnx.State,
    config: ModelConfig,
    plan: QuantPlan,
    layout: Layout,
    out: str | Path,
    *,
    input_scales: Maps[str, float] | None = None,
    native_fp4: bool = False,
    source: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes what a rollout holds (`quant.rollout_weights`): its FP4 codes and scales, and the rest in BF16.

    Args:
        rollout: parameters of the rollout.
        config: the model.
        plan: that the rollout was quantized by.
        layout: of the target engines.
        out: a folder that does not exist, or is empty.
        input_scales: of the sites `expert_input` and `down_input`, powers of two; engines take one number for all
            tokens. None exports weights only, with BF16 activations.
        native_fp4: the target's hardware multiplies FP4; lifts the limits of weight-only kernels.
        source: folder that the model came from.
        max_file_bytes: larger models have several files and an index.

    Raises:
        CheckpointFormatError: another format than NVFP4, a family that has no such layout, or values that a reader
            would decode to others; the message names them.
    """
    _check_plan(plan, layout)
    if input_scales is not None and set(input_scales) != {EXPERT_INPUT, DOWN_INPUT}:
        raise CheckpointFormatError(
            f"input scales are given for {sorted(input_scales)}; expected both of {EXPERT_INPUT} and {DOWN_INPUT}."
        )
    check_input_scales(input_scales)
    mapping, values = _checked(rollout, config, layout, native_fp4=native_fp4, input_scales=input_scales)
    quantization = quantization_config(layout, ignored_modules(mapping, config), input_scales)
    with new_folder(out) as folder:
        extra = _input_scale_tensors(mapping, layout, input_scales)
        save_tensors(folder, mapping, values, extra, max_file_bytes)
        _write_files(folder, {**_config(config, source), "quantization_config": quantization}, source)
        if layout.name == "modelopt":
            _write_json(folder / "hf_quant_config.json", modelopt_file(quantization))
        (folder / "README.md").write_text(readme(layout, plan, config, input_scales, native_fp4=native_fp4))


def export_mxfp4(
    rollout: nnx.State,
    config: ModelConfig,
    plan: QuantPlan,
    out: str | Path,
    *,
    source: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes what an MXFP4 rollout holds in the layout that gpt-oss is published in; the rest in BF16.

    Args:
        rollout: parameters of the rollout.
        config: a model of the family gpt_oss.
        plan: that the rollout was quantized by.
        out: a folder that does not exist, or is empty.
        source: folder that the model came from.
        max_file_bytes: larger models have several files and an index.

    Raises:
        CheckpointFormatError: another format than MXFP4, another family, or values that are not numbers.
    """
    _check_plan(plan, MXFP4_BLOCKS)
    mapping, values = _checked(rollout, config, MXFP4_BLOCKS, native_fp4=True)
    with new_folder(out) as folder:
        save_tensors(folder, mapping, values, {}, max_file_bytes)
        stated = {"quantization_config": mxfp4_config()}
        _write_files(folder, {**_config(config, source), **stated}, source)
        (folder / "README.md").write_text(mxfp4_readme(plan))


def _check_plan(plan: QuantPlan, layout: Layout | BlockLayout) -> None:
    if plan.fp4 != layout.format or not plan.experts:
        raise CheckpointFormatError(
            f"the plan quantizes experts={plan.experts} to {plan.format}; expected "
            f"{layout.format.name.upper()} experts for {layout.name}."
        )


def _checked(
    rollout: nnx.State,
    config: ModelConfig,
    layout: Layout | BlockLayout,
    *,
    native_fp4: bool,
    input_scales: Maps[str, float] | None = None,
) -> tuple[Mapping, dict[str, jax.Array]]:
    """The table of a rollout's export, and its arrays, all of which a reader decodes to the same values."""
    by_name = by_path(rollout)
    packed = {param: value for param, value in by_name.items() if isinstance(value, Fp4Array)}
    mapping, values = packed_mapping(config, frozenset(packed), layout), flat_arrays(by_name)
    check_finite(mapping, values)
    for param, value in packed.items():
        scale = None if input_scales is None else input_scales[_input_site(param)]
        check_packed(mapping, param, value, native_fp4=native_fp4, input_scale=scale)
    return mapping, values


def flat_arrays(values: Maps[str, Any]) -> dict[str, jax.Array]:
    """Parameters by dotted path, those in FP4 as their three arrays."""
    found = {}
    for param, value in values.items():
        if isinstance(value, Fp4Array):
            found |= {f"{param}.{leaf}": getattr(value, leaf) for leaf in ("words", "scales", "row_exponent")}
        else:
            found[param] = value
    return found


def packed_mapping(
    config: ModelConfig, packed: frozenset[str], layout: Layout | BlockLayout, names: Collection[str] = ()
) -> Mapping:
    """The table of a model whose parameters `packed` are in FP4; `names` are a folder's tensors, none for exports."""
    shapes: dict[str, tuple[int, ...]] = {}
    for param, shape in shapes_by_path(config).items():
        if param not in packed:
            shapes[param] = shape
            continue
        *lead, k, n = shape
        block = layout.format.block
        shapes |= {f"{param}.words": (*lead, k // 8, n), f"{param}.scales": (*lead, k // block, n)}
        if layout.format.has_row_scale:
            shapes[f"{param}.row_exponent"] = tuple(lead)
    links = [*layout.table(family_of(config), config, packed), *repeated_head(config, names)]
    return Mapping(links, shapes, layers_of(config))


def ignored_modules(mapping: Mapping, config: ModelConfig) -> list[str]:
    """Linear modules that stay BF16: all whose matrix is not packed, and a head that is the embedding."""
    kept = [
        name.removesuffix(".weight")
        for name, tensor in mapping.tensors.items()
        if tensor.codec == PLAIN
        and name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.uses[0].link.param != "embedding"
    ]
    return [*kept, "lm_head"] if config.tied_embedding else kept


def _input_site(param: str) -> str:
    """Quantization site of the activations that an expert matrix multiplies."""
    return DOWN_INPUT if param.endswith("down") else EXPERT_INPUT


def _input_scale_tensors(
    mapping: Mapping, layout: Layout, input_scales: Maps[str, float] | None
) -> dict[str, np.ndarray]:
    if input_scales is None:
        return {}
    found = {}
    for name, tensor in mapping.tensors.items():
        param, _, leaf = tensor.uses[0].link.param.rpartition(".")
        if tensor.codec != PLAIN and leaf == "row_exponent":
            scale = input_scales[_input_site(param)]
            value = np.float32(1 / scale if layout.inverse else scale)
            found[f"{name.rpartition('.')[0]}.{layout.input_scale}"] = np.full((1,) * layout.ndim, value)
    return found


def _config(config: ModelConfig, source: str | Path | None) -> dict[str, Any]:
    return write_config(
        config, None if source is None else read_json(Path(source) / "config.json", CheckpointFormatError)
    )


def _write_files(folder: Path, hf_config: dict[str, Any], source: str | Path | None) -> None:
    _write_json(folder / "config.json", hf_config)
    for file in copied_files(None if source is None else Path(source)):
        shutil.copyfile(file, folder / file.name)


def _write_json(path: Path, content: Maps[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
