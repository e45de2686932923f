"""How far trainer and rollout are apart: codes, values, log-probs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import unpack_codes
from kernels_pallas.quantize import dequantize

CODE_METRICS = ("d_act", "code_mismatch", "adjacent_share", "scale_mismatch")


def logprob_mismatch(
    train: Float[Array, "B S"], rollout: Float[Array, "B S"], mask: Bool[Array, "B S"]
) -> dict[str, Float[Array, ""]]:
    """Gap between the two policies on the sampled tokens.

    `kl_k1` = mean(log rollout - log train), `kl_k3` = mean(r - 1 - log r) with r = train / rollout, `ess` the effective
    sample size of weights r as a share of the tokens, `pearson` the correlation of the two probabilities.
    """
    count = jnp.maximum(jnp.sum(mask), 1)

    def mean(x):
        return jnp.sum(jnp.where(mask, x, 0.0)) / count

    log_ratio = jnp.where(mask, train - rollout, 0.0)
    gap = jnp.abs(log_ratio)
    ratio = jnp.exp(log_ratio)
    # Masked tokens sort first as 0, so the k-th largest over the tokens is read from the end.
    rank = jnp.clip((0.001 * count).astype(jnp.int32), 0, gap.size - 1)
    p, q = jnp.where(mask, jnp.exp(train), 0.0), jnp.where(mask, jnp.exp(rollout), 0.0)
    dp, dq = jnp.where(mask, p - mean(p), 0.0), jnp.where(mask, q - mean(q), 0.0)
    spread = jnp.sqrt(jnp.sum(dp * dp) * jnp.sum(dq * dq))
    return {
        "logprob_abs_diff_mean": mean(gap),
        "logprob_abs_diff_p999": jnp.sort(gap.reshape(-1))[gap.size - 1 - rank],
        "logprob_abs_diff_max": jnp.max(gap),
        "kl_k1": mean(-log_ratio),
        "kl_k3": mean(ratio - 1 - log_ratio),
        "ess": jnp.square(mean(ratio)) / jnp.maximum(mean(jnp.square(ratio)), 1e-30),
        "pearson": jnp.sum(dp * dq) / jnp.maximum(spread, 1e-30),
    }


def _signed(codes: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Codes as steps on the signed grid, so that neighbours differ by 1, across zero too."""
    magnitude = (codes & 7).astype(jnp.int32)
    return jnp.where(codes >= 8, -magnitude, magnitude)


@jax.jit
def compare_codes(
    rollout: Fp4Array, trainer: Fp4Array, rows: Bool[Array, "*rows"]
) -> dict[str, Float[Array, " L"]]:
    """Per layer, how the trainer's FP4 values differ from the rollout's.

    Args:
        rollout: `[L, ..., K]`, quantized along the last axis.
        trainer: the same rows.
        rows: `[L, ...]`, rows to compare (fed, on both sides).

    Returns:
        `[L]` each: `d_act` = |Qt - Qr| / |Qr| (Frobenius, dequantized), `code_mismatch` = share of differing codes,
        `adjacent_share` of the mismatches (1 if there are none), `scale_mismatch` = share of blocks whose
        scale differs, row scale included.
    """
    axes = tuple(range(1, rows.ndim))
    values = rows[..., None]
    a, b = unpack_codes(rollout.words), unpack_codes(trainer.words)
    differs = (a != b) & values
    adjacent = differs & (jnp.abs(_signed(a) - _signed(b)) == 1)
    scales = (
        (rollout.scales != trainer.scales) | (rollout.row_exponent != trainer.row_exponent)[..., None]
    ) & values
    qr, qt = (jnp.where(values, dequantize(x, jnp.float32), 0.0) for x in (rollout, trainer))

    def total(x):
        return jnp.sum(x, axis=(*axes, -1), dtype=jnp.float32)

    count = jnp.maximum(jnp.sum(rows, axis=axes), 1)
    mismatches = total(differs)
    return {
        "d_act": jnp.sqrt(total(jnp.square(qt - qr)) / jnp.maximum(total(jnp.square(qr)), 1e-30)),
        "code_mismatch": mismatches / (count * a.shape[-1]),
        "adjacent_share": jnp.where(mismatches > 0, total(adjacent) / jnp.maximum(mismatches, 1), 1.0),
        "scale_mismatch": total(scales) / (count * rollout.scales.shape[-1]),
    }
