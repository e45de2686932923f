"""Model configuration: shared parts, each with the choices that families make."""

import dataclasses
from typing import NamedTuple

from trace_jax.config import ConfigError, check_range
from trace_jax.models.rope import RopeConfig
from trace_jax.models.router import RouterConfig
from trace_jax.quant import DOWN_INPUT, EXPERT_INPUT, KEY, VALUE

FAMILIES = (
    "tiny_moe",
    "qwen3_moe",
    "qwen3_5_moe",
    "olmoe",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "llama",
    "llama_moe",
)
DTYPES = ("bfloat16", "float32", "float64")
ATTENTION_KINDS = ("full", "sliding")
LAYER_TYPES = (*ATTENTION_KINDS, "delta", "latent")
QK_NORMS = ("none", "head", "full")
ACTIVATIONS = ("swiglu", "clamped_swiglu")


class Layer(NamedTuple):
    """What one layer is made of: its `mixer` and `ffn` name the stacks of parameters that it is a part of.

    `mixer` is `attention`, `delta` or `latent`; `window` the entries that attention sees at most, None for all;
    `ffn` is `moe` or `dense`.
    """

    mixer: str
    window: int | None
    ffn: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Gated DeltaNet layers: heads and their sizes, and the width of the causal convolution in tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    def __post_init__(self):
        check_range("model.delta", self, *(f.name for f in dataclasses.fields(self)), at_least=1)
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"model.delta.value_heads {self.value_heads} is not a multiple of key_heads {self.key_heads}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: ranks of the low-rank projections and sizes of a head's parts.

    `query_rank` None projects queries directly.
    """

    query_rank: int | None = None
    latent_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def __post_init__(self):
        sizes = [
            f.name for f in dataclasses.fields(self) if f.name != "query_rank" or self.query_rank is not None
        ]
        check_range("model.latent", self, *sizes, at_least=1)
        if self.rope_dim % 2:
            raise ConfigError(
                f"model.latent.rope_dim is {self.rope_dim}; RoPE rotates pairs: expected an even size."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, most of whose layers are Mixtures of Experts. The defaults are Qwen3-MoE layers.

    Sizes count elements. `dtype` is the compute dtype (masters are always FP32 or wider); `float32` and `float64` serve
    gradient and equality tests.

    Layers: `layer_types` is the period that repeats over the depth; the first `dense_layers` have an MLP of
    `dense_hidden_size` in the place of experts. `window` counts the entries that a `sliding` layer sees, its own
    included.

    Attention: `qk_norm` normalises queries and keys per head, over all heads together (`full`) or not; `output_gate`
    multiplies each head's result by a sigmoid; `sinks` adds a logit per head to the softmax's denominator.

    Experts: `expert_hidden_size` is the width of one expert, `shared_expert_size` that of the expert that all tokens
    share (0: none), with `shared_expert_gate` behind a sigmoid. `centred_norms`: gains are stored as their distance
    from one.
    """

    family: str = "tiny_moe"
    vocab_size: int = 0  # 0: taken from the task's tokenizer when the run is wired
    hidden_size: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    experts_per_token: int = 2
    expert_hidden_size: int = 64
    norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    router: RouterConfig = dataclasses.field(default_factory=RouterConfig)
    layer_types: tuple[str, ...] = ("full",)
    window: int | None = None
    dense_layers: int = 0
    dense_hidden_size: int = 0
    shared_expert_size: int = 0
    shared_expert_gate: bool = False
    qk_norm: str = "head"
    attention_bias: bool = False
    output_gate: bool = False
    sinks: bool = False
    centred_norms: bool = False
    tied_embedding: bool = False
    activation: str = "swiglu"
    activation_limit: float = 7.0
    activation_alpha: float = 1.702
    expert_bias: bool = False
    delta: DeltaConfig | None = None
    latent: LatentConfig | None = None
    dtype: str = "bfloat16"
    remat: bool = False

    def __post_init__(self):
        for name, allowed in (
            ("family", FAMILIES),
            ("dtype", DTYPES),
            ("qk_norm", QK_NORMS),
            ("activation", ACTIVATIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"model.{name} is {getattr(self, name)!r}; expected one of {allowed}.")
        sizes = ["hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"]
        if self.dense_layers < self.num_layers:
            sizes += ["num_experts", "experts_per_token", "expert_hidden_size"]
        if self.dense_layers > 0:
            sizes += ["dense_hidden_size"]
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; expected a positive size.")
        check_range("model", self, "norm_eps", "activation_limit", above=0)
        if self.vocab_size < 0:
            raise ValueError(
                f"model.vocab_size is {self.vocab_size}; expected 0 (from the tokenizer) or more."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "every KV head must serve the same number of query heads."
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}."
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim is {self.head_dim}; RoPE rotates pairs, so it must be even.")
        if self.expert_bias != (self.activation == "clamped_swiglu"):
            raise ValueError(
                f"model.activation is {self.activation!r} with expert_bias={self.expert_bias}; expected biases exactly "
                "with 'clamped_swiglu', as gpt-oss has them."
            )
        self._check_layers()
        self.router.check(self.num_experts, self.experts_per_token)

    def _check_layers(self):
        if not self.layer_types or not set(self.layer_types) <= set(LAYER_TYPES):
            raise ValueError(f"model.layer_types is {self.layer_types}; expected some of {LAYER_TYPES}.")
        if not 0 <= self.dense_layers <= self.num_layers:
            raise ValueError(f"model.dense_layers is {self.dense_layers}; expected 0 to {self.num_layers}.")
        for kind, needed in (("sliding", "window"), ("delta", "delta"), ("latent", "latent")):
            if (kind in self.layer_types) != (getattr(self, needed) is not None):
                raise ValueError(
                    f"model.layer_types is {self.layer_types} and model.{needed} is {getattr(self, needed)}; "
                    f"expected {needed} exactly where there are {kind!r} layers."
                )
        attention = {name for name in ("attention_bias", "output_gate", "sinks") if getattr(self, name)}
        if attention and not set(self.layer_types) & set(ATTENTION_KINDS):
            raise ValueError(
                f"model sets {sorted(attention)} without attention layers, layer_types {self.layer_types}."
            )
        if self.shared_expert_gate and not self.shared_expert_size:
            raise ValueError(
                "model.shared_expert_gate is set, but shared_expert_size is 0; expected a shared expert."
            )
        if self.dense_hidden_size and not self.dense_layers:
            raise ValueError(
                f"model.dense_hidden_size is {self.dense_hidden_size}, but dense_layers is 0; expected dense layers."
            )
        if self.activation == "clamped_swiglu" and (self.dense_layers or self.shared_expert_size):
            raise ValueError(
                "model.activation 'clamped_swiglu' is for routed experts alone; expected no dense layers and no shared "
                f"expert, got dense_layers={self.dense_layers} and shared_expert_size={self.shared_expert_size}."
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"model.window is {self.window}; expected at least 1, the token itself.")

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What each layer is made of, from the first to the last."""

        def layer(index):
            kind = self.layer_types[index % len(self.layer_types)]
            return Layer(
                mixer="attention" if kind in ATTENTION_KINDS else kind,
                window=self.window if kind == "sliding" else None,
                ffn="dense" if index < self.dense_layers else "moe",
            )

        return tuple(layer(index) for index in range(self.num_layers))

    def layers_of(self, stack: str) -> tuple[int, ...]:
        """Indices of the layers that are a part of a stack of parameters, in its order (see `Layer`)."""
        return tuple(i for i, layer in enumerate(self.layers) if stack in (layer.mixer, layer.ffn))

    def site_layers(self, site: str) -> tuple[int, ...]:
        """Indices of the layers that have a quantization site.

        The latent of `latent` layers is a key, and there are no values besides it. `delta` layers have no cache that
        grows with the context, so nothing of them is quantized.
        """
        if site in (EXPERT_INPUT, DOWN_INPUT):
            return self.layers_of("moe")
        stacks = {KEY: ("attention", "latent"), VALUE: ("attention",)}[site]
        return tuple(sorted(i for stack in stacks for i in self.layers_of(stack)))

    def row_shape(self, site: str) -> tuple[int, ...]:
        """Shape of one row at a quantization site."""
        if site == EXPERT_INPUT:
            return (self.hidden_size,)
        if site == DOWN_INPUT:
            return (self.experts_per_token, self.expert_hidden_size)
        return (self.num_kv_heads, self.head_dim) if self.latent is None else (self.latent.latent_rank,)

    @property
    def contractions(self) -> dict[str, dict[str, int]]:
        """Sizes that FP4 blocks must divide, by name, as `QuantPlan.check` takes them."""
        experts, kv = {}, {}
        if self.layers_of("moe"):
            experts = {"hidden_size": self.hidden_size, "expert_hidden_size": self.expert_hidden_size}
        if self.layers_of("attention"):
            kv["head_dim"] = self.head_dim
        if self.latent is not None:
            kv["latent.latent_rank"] = self.latent.latent_rank
        return {"experts": experts, "kv": kv}


def run_like(model: ModelConfig, other: ModelConfig) -> ModelConfig:
    """A checkpoint's model, run as another is: dtype and remat are not a matter of the checkpoint."""
    return dataclasses.replace(model, dtype=other.dtype, remat=other.remat)


def check_same_model(found: ModelConfig, model: ModelConfig, path: str) -> None:
    """Raises ConfigError, naming the fields, unless the checkpoint at `path` is of the configured model."""
    found = run_like(found, model)
    wrong = [
        f"model.{field.name} is {getattr(model, field.name)!r}, not {getattr(found, field.name)!r}"
        for field in dataclasses.fields(model)
        if getattr(found, field.name) != getattr(model, field.name)
    ]
    if wrong:
        raise ConfigError(f"{path} holds another model: {', '.join(wrong)}.")
