"""Token-to-expert dispatch, hidden behind [token, route slot] indexing.

Callers never see the sorted order, so records and quantization sites cannot depend on it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.activations import Activation
from kernels_pallas.arrays import Fp4Array, Stacked
from kernels_pallas.grouped_matmul import grouped_matmul


class Dispatch(NamedTuple):
    """Permutation of the T*k (token, route slot) pairs that sorts them by expert."""

    order: jax.Array
    inverse: jax.Array
    group_sizes: jax.Array


def make_dispatch(experts: Int[Array, "T k"], num_experts: int) -> Dispatch:
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    inverse = (
        jnp.zeros_like(order).at[order].set(jnp.arange(flat.size, dtype=order.dtype), unique_indices=True)
    )
    group_sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    return Dispatch(order, inverse, group_sizes)


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    # The transpose of a permutation is a gather too; autodiff would emit a scatter-add (slow, and unordered on GPU).
    return x[order]


_permute.defvjp(
    lambda x, order, inverse: (x[order], inverse), lambda inverse, cotangent: (cotangent[inverse], None, None)
)


def expert_matmul(
    x: Array | Fp4Array,
    w: Array | Fp4Array | Stacked,
    dispatch: Dispatch,
    experts_per_token: int,
    *,
    bias: Float[Array, "E N"] | None = None,
    activation: Activation | None = None,
) -> Float[Array, "T k _"]:
    """Multiplies each (token, route slot) row with its own expert's matrix.

    Args:
        x: `[T, K]` rows shared by all route slots, or `[T, k, K]`.
        w: `[E, K, N]`.
        dispatch: of the same T tokens.
        experts_per_token: k.
        bias, activation: as in `grouped_matmul`.

    Returns:
        FP32 (or wider) `[T, k, N]`; half as many columns after an activation.
    """
    k = experts_per_token
    num_tokens = dispatch.order.size // k
    shared = x.ndim == 2

    def rows(leaf):
        if shared:
            leaf = jnp.broadcast_to(leaf[:, None], (num_tokens, k, *leaf.shape[1:]))
        flat = leaf.reshape(num_tokens * k, *leaf.shape[2:])
        if jnp.issubdtype(flat.dtype, jnp.floating):
            return _permute(flat, dispatch.order, dispatch.inverse)
        return flat[dispatch.order]

    out = grouped_matmul(jax.tree.map(rows, x), w, dispatch.group_sizes, bias=bias, activation=activation)
    return _permute(out, dispatch.inverse, dispatch.order).reshape(num_tokens, k, out.shape[-1])
