"""From the codes a rollout computed to the compact record, inside the jitted step."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt8, UInt32

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.guided_round import compact_scales
from trace_jax.guidance.record import SiteRecord
from trace_jax.guidance.spec import GuidanceSpec


def mantissa_bits(words: UInt32[Array, "*rows K8"]) -> UInt8[Array, "*rows K8"]:
    """Low bit of each of the 8 codes in a word, gathered into one byte (code i in bit i).

    Neighbouring E2M1 magnitudes differ in exactly this bit, so it names one of the two values around any input.
    """
    bits = words & jnp.uint32(0x11111111)
    for shift, mask in ((3, 0x03030303), (6, 0x000F000F), (12, 0x000000FF)):
        bits = (bits | (bits >> jnp.uint32(shift))) & jnp.uint32(mask)
    return bits.astype(jnp.uint8)


def poisoned_rows(q: Fp4Array) -> Bool[Array, "*rows"]:
    """Rows with a block that held NaN or Inf."""
    return jnp.any(q.scales == q.format.poison, axis=-1)


def capture_site(
    site: str,
    q: Fp4Array,
    valid: Bool[Array, "B T"],
    spec: GuidanceSpec,
    mantissa: UInt8[Array, "*rows K8"] | None = None,
) -> SiteRecord:
    """Record of one layer's rows: everything the trainer needs, and nothing for rows that are padding.

    Args:
        site: where `q` was quantized.
        q: `[B, T, ..., K]` quantized along its last axis.
        valid: rows that really were fed.
        spec: what to keep.
        mantissa: `mantissa_bits` of `q`, where the kernel that quantized it gave them; else they are made here.
    """
    if spec.mode == "mantissa" and mantissa is None:
        mantissa = mantissa_bits(q.words)
    keep = valid.reshape(*valid.shape, *(1,) * (q.row_exponent.ndim - 2))
    if spec.compact_scales:  # whole scale bytes say it themselves
        keep &= ~poisoned_rows(q)
    return SiteRecord(
        row_exponent=jnp.where(keep, q.row_exponent, jnp.uint8(0)),
        scales=compact_scales(q.scales) if spec.compact_scales else q.scales,
        mantissa=mantissa if spec.mode == "mantissa" else None,
        words=q.words if spec.mode == "full" else None,
        site=site,
        spec=spec,
    )


def take_rows(q: Fp4Array, rows: tuple[int, ...]) -> Fp4Array:
    """Sequences `rows` of an array that leads with the batch axis."""
    return jax.tree.map(lambda leaf: leaf[jnp.asarray(rows)], q)
