"""Hugging Face folders: one table per family, for import and export, and FP4 checkpoints."""

from trace_jax.hf.export import export_bf16, export_mxfp4, export_nvfp4
from trace_jax.hf.families import Family, family_of, read_config, write_config
from trace_jax.hf.folder import CheckpointFormatError
from trace_jax.hf.importing import (
    Imported,
    Quantized,
    is_hf_folder,
    load_model,
    load_quantized,
    read_model_config,
)
from trace_jax.hf.layouts import COMPRESSED_TENSORS, LAYOUTS, MODELOPT, Layout

__all__ = [
    "COMPRESSED_TENSORS",
    "LAYOUTS",
    "MODELOPT",
    "CheckpointFormatError",
    "Family",
    "Imported",
    "Layout",
    "Quantized",
    "export_bf16",
    "export_mxfp4",
    "export_nvfp4",
    "family_of",
    "is_hf_folder",
    "load_model",
    "load_quantized",
    "read_config",
    "read_model_config",
    "write_config",
]
