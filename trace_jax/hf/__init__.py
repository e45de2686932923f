"""Hugging Face folders: one table per family, for import and export, and NVFP4 exports for serving engines."""

from trace_jax.hf.families import Family, family_of, read_config, write_config
from trace_jax.hf.folder import CheckpointFormatError
from trace_jax.hf.importing import Imported, load_model, read_model_config

__all__ = [
    "CheckpointFormatError",
    "Family",
    "Imported",
    "family_of",
    "load_model",
    "read_config",
    "read_model_config",
    "write_config",
]
