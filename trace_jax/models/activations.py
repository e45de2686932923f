"""Activations and biases of experts, row by (token, route slot) row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.dots import accumulator_dtype


def clamped_swiglu(
    gate_up: Float[Array, "*rows F2"], *, alpha: float, limit: float
) -> Float[Array, "*rows F"]:
    """(up + 1) * gate * sigmoid(alpha * gate), gate at most `limit` and |up| at most `limit` (arXiv 2508.10925).

    The columns of `gate_up` are a gate's, then those of an up projection, biases included.
    """
    gate, up = jnp.split(gate_up, 2, axis=-1)
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


@jax.custom_vjp
def expert_bias(bias: Float[Array, "E N"], experts: Int[Array, "*rows"]) -> Float[Array, "*rows N"]:
    """The bias of each (token, route slot) row's own expert, to be added to what `expert_matmul` gives."""
    return bias[experts]


def _expert_bias_fwd(bias, experts):
    return expert_bias(bias, experts), (experts, bias)


def _expert_bias_bwd(residuals, cotangent):
    # A GEMM in the place of autodiff's scatter-add, in which thousands of rows contend for a few addresses, unordered.
    experts, bias = residuals
    acc = accumulator_dtype(bias.dtype)
    chosen = jax.nn.one_hot(experts.reshape(-1), bias.shape[0], dtype=acc)
    cotangent = cotangent.reshape(-1, bias.shape[1]).astype(acc)
    summed = jnp.einsum("re,rn->en", chosen, cotangent, precision="highest")
    return summed.astype(bias.dtype), None


expert_bias.defvjp(_expert_bias_fwd, _expert_bias_bwd)
