"""The MLP of layers without experts."""

from flax import nnx

from trace_jax.models.config import ModelConfig
from trace_jax.models.layers import mlp, norm_gain, param, rms_norm


class Dense(nnx.Module):
    """SwiGLU MLP in the compute dtype."""

    def __init__(self, config: ModelConfig, layers: int, rngs: nnx.Rngs):
        c, lead, hidden = config, (layers,), config.dense_hidden_size
        self.norm = norm_gain(rngs, (*lead, c.hidden_size), ("layers", "norm"), centred=c.centred_norms)
        self.gate_up = param(
            rngs, (*lead, c.hidden_size, 2 * hidden), ("layers", "embed", "mlp"), c.hidden_size
        )
        self.down = param(rngs, (*lead, hidden, c.hidden_size), ("layers", "mlp", "embed"), hidden)

    def __call__(self, x, config: ModelConfig):
        h = rms_norm(x, self.norm, config.norm_eps, centred=config.centred_norms)
        return x + mlp(h, self.gate_up, self.down)
