"""Attention of new tokens over the KV cache."""

from kernels_pallas.decode_attention.api import attend, attention

__all__ = ["attend", "attention"]
