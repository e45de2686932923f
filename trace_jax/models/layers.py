"""What the layers of all families are made of: parameters, norms, projections, and what a layer reads.

Shapes: B sequences, T tokens fed, D hidden, H query heads, G KV heads, d head_dim, E experts, k experts per token, F
expert hidden. Modules carry a leading `layers` axis in their parameters; a call sees one slice of it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels_pallas import norms
from kernels_pallas.activations import activated
from kernels_pallas.arrays import Stacked
from kernels_pallas.matmul import matmul
from trace_jax.quant import cast_weight


def param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    fan_in: int | None = None,
    *,
    constant: float | None = None,
) -> nnx.Param:
    """FP32 master with logical axes: normal with variance 1/fan_in, or a constant: 1 for gains, unless stated."""
    if len(shape) != len(axes):
        raise ValueError(
            f"parameter of shape {shape} has logical axes {axes}; expected one name per dimension."
        )
    if fan_in is None:
        value = jnp.full(shape, 1.0 if constant is None else constant, jnp.float32)
    else:
        value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value, logical_axes=axes)


def norm_gain(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], *, centred: bool = False
) -> nnx.Param:
    """The gain of a norm that does nothing yet; stored as its distance from one where `centred`."""
    return param(rngs, shape, axes, constant=0.0 if centred else 1.0)


def wide(dtype) -> jnp.dtype:
    """Accumulation dtype: FP32, or FP64 when the model runs in FP64."""
    return jnp.promote_types(dtype, jnp.float32)


def gain_of(gain: nnx.Param, dtype, centred: bool = False) -> Float[Array, " D"]:
    """A norm's gain, rounded to the compute dtype like every weight that is sent to the rollout."""
    value = cast_weight(gain[...], dtype)
    return value.astype(wide(dtype)) + 1 if centred else value


def rms_norm(
    x: Float[Array, "*rows D"], gain: nnx.Param, eps: float, *, centred: bool = False
) -> Float[Array, "*rows D"]:
    """`norms.rms_norm` with a parameter as its gain."""
    return norms.rms_norm(x, gain_of(gain, x.dtype, centred), eps)


def linear(
    x: Float[Array, "*rows K"], w: nnx.Param, bias: nnx.Param | None = None
) -> Float[Array, "*rows N"]:
    """Projection in the compute dtype; a bias is added before the result is rounded. `w` may be a layer of a stack."""
    value = w.get_value()
    out = matmul(x, value if isinstance(value, Stacked) else cast_weight(value, x.dtype))
    if bias is not None:
        row = cast_weight(bias[...], x.dtype).astype(out.dtype)
        out = out + row.reshape((1,) * (out.ndim - 1) + (-1,))
    return out.astype(x.dtype)


def mlp(h: Float[Array, "*rows D"], gate_up: nnx.Param, down: nnx.Param) -> Float[Array, "*rows D"]:
    """SwiGLU MLP in the compute dtype, its activation in FP32."""
    act = activated(linear(h, gate_up).astype(wide(h.dtype)), "swiglu").astype(h.dtype)
    return linear(act, down)


class LayerInputs(NamedTuple):
    """What one layer reads besides the residual stream; every field may be None.

    `cache` is the mixer's, stacked over its layers where `layer` is this layer's index in it, of this layer alone where
    `layer` is None; `page_table` int32 `[B, pages]` where the cache is paged; `window` is static.
    """

    cache: Any = None
    layer: Int[Array, ""] | None = None
    page_table: Int[Array, "B pages"] | None = None
    window: int | None = None
    routes: Int[Array, "B T k"] | None = None
    guides: dict[str, Any] | None = None
    weight_guides: dict[str, Any] | None = None
