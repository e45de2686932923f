"""Write a run's policy, or another checkpoint, as a Hugging Face folder.

    python -m experiments.export_hf run=runs/demo/qat_0 format=compressed-tensors out=runs/export

Formats: `bf16`; `compressed-tensors` and `modelopt` are NVFP4 for serving engines, `mxfp4` is the layout that gpt-oss
is published in, all with the codes of the rollouts. The README in the folder of an FP4 export says what an engine does
otherwise.
"""

import dataclasses
import sys
from pathlib import Path

import hydra
import jax
from flax import nnx
from omegaconf import DictConfig

from experiments.common import CONFIGS, run_model, script
from trace_jax.config import ConfigError, from_mapping
from trace_jax.hf import LAYOUTS, export_bf16, export_mxfp4, export_nvfp4, is_hf_folder, load_model
from trace_jax.models import ModelConfig
from trace_jax.quant import DOWN_INPUT, EXPERT_INPUT, QuantPlan, rollout_weights
from trace_jax.rl import MethodConfig
from trace_jax.rl.run import SMOLLM2, load_params
from trace_jax.runs import RunFolder

MXFP4 = "mxfp4"
FORMATS = ("bf16", *sorted(LAYOUTS), MXFP4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to export, and how.

    Either `run`, a run's or warm start's folder (`step` None is its latest checkpoint), or `checkpoint`, a Hugging Face
    folder in BF16 or gpt-oss's MXFP4. The input scales, both or none, are for engines that quantize activations; see
    `export_nvfp4`.
    """

    out: str
    format: str
    run: str | None = None
    step: int | None = None
    checkpoint: str | None = None
    expert_input_scale: float | None = None
    down_input_scale: float | None = None
    native_fp4: bool = False

    def __post_init__(self):
        if self.format not in FORMATS:
            raise ConfigError(f"format is {self.format!r}; expected one of {FORMATS}.")
        if (self.run is None) == (self.checkpoint is None):
            raise ConfigError(
                f"run is {self.run!r} and checkpoint is {self.checkpoint!r}; expected exactly one of them."
            )
        scales = (self.expert_input_scale, self.down_input_scale)
        if (scales[0] is None) != (scales[1] is None):
            raise ConfigError(f"expert_input_scale and down_input_scale are {scales}; expected both or none.")
        if self.format not in LAYOUTS and (self.native_fp4 or scales[0] is not None):
            raise ConfigError(
                f"input scales and native_fp4 are for NVFP4 exports; the format is {self.format!r}."
            )

    @property
    def input_scales(self) -> dict[str, float] | None:
        if self.expert_input_scale is None:
            return None
        return {EXPERT_INPUT: self.expert_input_scale, DOWN_INPUT: self.down_input_scale}


def read_masters(config: ExportConfig) -> tuple[ModelConfig, nnx.State, QuantPlan]:
    """Model, masters, and the plan of its rollouts (the format's default where there were none in FP4)."""
    default = QuantPlan(format=MXFP4 if config.format == MXFP4 else "nvfp4")
    if config.checkpoint is not None:
        loaded = load_model(config.checkpoint)
        return loaded.config, loaded.params, default
    model, _, stored = run_model(config.run)
    plan = None
    if "method" in stored:
        plan = from_mapping(MethodConfig, stored["method"]).rollout_plan()
    return model, load_params(config.run, model, config.step), plan or default


def source_of(config: ExportConfig) -> str | None:
    """The Hugging Face folder whose tokenizer and further keys of `config.json` go with the export, if there is one.

    A run that began from something that is not there any more says so, and is exported without.
    """
    if config.checkpoint is not None:
        return config.checkpoint
    start = config.run
    while start is not None and not is_hf_folder(start):
        if start == SMOLLM2 or not RunFolder(Path(start)).config_path.is_file():
            gone = (
                "SmolLM2's package, whose files are no folder,"
                if start == SMOLLM2
                else f"{start}, which is gone"
            )
            print(f"{config.run} began from {gone}: no tokenizer goes with the export.", file=sys.stderr)
            return None
        start = RunFolder(Path(start)).config().get("init_from")
    return start


def export(config: ExportConfig) -> None:
    """Writes the folder that the config describes."""
    model, masters, plan = read_masters(config)
    source = source_of(config)
    if config.format == "bf16":
        export_bf16(masters, model, config.out, source=source)
        return
    rollout = jax.jit(rollout_weights, static_argnums=(1, 2))(masters, plan, "bfloat16")
    if config.format == MXFP4:
        export_mxfp4(rollout, model, plan, config.out, source=source)
        return
    export_nvfp4(
        rollout,
        model,
        plan,
        LAYOUTS[config.format],
        config.out,
        input_scales=config.input_scales,
        native_fp4=config.native_fp4,
        source=source,
    )


@hydra.main(config_path=CONFIGS, config_name="export_hf", version_base="1.3")
@script
def main(config: DictConfig) -> None:
    parsed = from_mapping(ExportConfig, config)
    export(parsed)
    print(f"Written to {parsed.out}/")


if __name__ == "__main__":
    main()
