# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How far apart are trainer and rollout?
#
# In FP4 RL the policy that acts (the rollout) and the policy that is optimised (the trainer) round the same
# numbers to 4 bits, but not the *same* numbers: their BF16 values differ in the last bits. This notebook
#
# 1. shows with the real quantizer how rounding turns such a difference into a whole FP4 step,
# 2. opens the guidance record of a real RL run,
# 3. runs the trainer on it with and without guidance and compares codes and log-probs,
# 4. counts what each record costs.
#
# By default it makes a short run of its own in a temporary folder (one to two minutes on two CPU cores). To look at
# one of yours, start it with `rl.save_trajectories_every=10 rl.checkpoint_every=10 rl.keep_checkpoints=1000` and set
# the environment variable `TRACE_RUN` to its folder.

# %%
import dataclasses
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from hydra import compose, initialize_config_dir

from experiments.common import CONFIGS, enable_compilation_cache, method_config
from kernels_pallas.formats import MXFP4, NVFP4, pack_bits
from kernels_pallas.guided_round import Guide, guided_round
from kernels_pallas.quantize import dequantize, quantize
from trace_jax.config import from_mapping
from trace_jax.guidance import RecordError
from trace_jax.guidance.budget import bytes_per_token, site_budget
from trace_jax.rl import make_batch
from trace_jax.rl.recorded import open_step, stored_steps, view_as
from trace_jax.rl.run import RunConfig, train, with_vocabulary
from trace_jax.rl.warmstart import WarmStartConfig, warm_start
from trace_jax.rollout.rerecord import rerecord
from trace_jax.runs import read_metrics
from trace_jax.tasks import make_task

# %% [markdown]
# ## 1. 2.51 and 2.49
#
# FP4 (E2M1) has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Under a block scale of 24, the values 60.24 and 59.76
# are 2.51 and 2.49 steps; the midpoint between 2 and 3 is 2.5. One becomes 3 and the other 2: a difference of 0.5
# before rounding is one of 24 after it.

# %%
# One NVFP4 block of 16 values. Its largest, 144 = 6 x 24, sets the block scale to 24.
rollout_x = jnp.zeros((1, 16), jnp.float32).at[0, :2].set(jnp.asarray([144.0, 60.24]))
trainer_x = rollout_x.at[0, 1].set(59.76)

quantize_jit = jax.jit(quantize, static_argnums=1)
guided_round_jit = jax.jit(guided_round, static_argnums=2)
rollout_q, trainer_q = quantize_jit(rollout_x, NVFP4), quantize_jit(trainer_x, NVFP4)
for name, x, q in (("rollout", rollout_x, rollout_q), ("trainer", trainer_x, trainer_q)):
    value = dequantize(q, jnp.float32)[0, 1]
    print(f"{name}: {float(x[0, 1]):.2f} -> code {int(q.unpack().codes[0, 1])} -> {float(value):.0f}")

# %% [markdown]
# Guidance: the rollout keeps its scales and the lowest bit of every code. Neighbouring E2M1 codes differ in exactly
# that bit, so it names one of the two values around the trainer's own number.

# %%
guide = Guide(
    scales=rollout_q.scales,
    row_exponent=rollout_q.row_exponent,
    mantissa=pack_bits(rollout_q.unpack().codes & 1),
    valid=jnp.ones((1,), bool),
    mode="mantissa",
)
guided = guided_round_jit(trainer_x, guide, NVFP4)
print(f"guided:  {float(trainer_x[0, 1]):.2f} -> {float(dequantize(guided, jnp.float32)[0, 1]):.0f}")
assert (
    float(dequantize(guided, jnp.float32)[0, 1]) == 72
    and float(dequantize(trainer_q, jnp.float32)[0, 1]) == 48
)

# %% [markdown]
# How often does this happen? Take BF16 noise of growing size on random rows, and count the codes that differ.

# %%
rng = np.random.default_rng(0)
x = rng.standard_normal((256, 256)).astype(np.float32)
noise = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3]
q = quantize_jit(jnp.asarray(x), NVFP4)
codes = q.unpack().codes
guide = Guide(
    scales=q.scales,
    row_exponent=q.row_exponent,
    mantissa=pack_bits(codes & 1),
    valid=jnp.ones((256,), bool),
    mode="mantissa",
)
own, one_bit = [], []
for size in noise:
    noisy = jnp.asarray(x * (1 + size * rng.standard_normal(x.shape)), jnp.float32)
    own.append(float(jnp.mean(quantize_jit(noisy, NVFP4).unpack().codes != codes)))
    one_bit.append(float(jnp.mean(guided_round_jit(noisy, guide, NVFP4).codes != codes)))
for row in zip(noise, own, one_bit, strict=True):
    print(
        "relative noise {:5.3f}: {:7.3%} of codes differ by own rounding, {:7.3%} guided by 1 bit".format(
            *row
        )
    )

# %% [markdown]
# One bit is enough while both sides are within a step of each other. Beyond about 10 % of noise it names the wrong
# neighbour more and more often: guidance prevents drift, it does not repair it.

# %% [markdown]
# ## 2. A real run and its record
#
# A supervised warm start of 60 steps, then two RL steps with `trace_all_layers`: NVFP4 rollout, guided trainer. All
# sequences are audited, which keeps their full codes at every site and layer; the record itself is 1 bit a value.

# %%
root = tempfile.mkdtemp(prefix="trace_notebook_")
enable_compilation_cache(root)
with initialize_config_dir(CONFIGS, version_base="1.3"):
    names = (
        "fp4_rollout",
        "qat",
        "trace",
        "trace_all_layers",
        "trace_all_sites",
        "trace_full",
        "trace_scale",
        "trace_compact_scales",
    )
    methods = {name: method_config(name) for name in names}
    warm = compose("warmstart", overrides=[f"root={root}", "warmstart.steps=60", "warmstart.batch=64"])
    short = compose(
        "train",
        overrides=[
            f"root={root}",
            f"init_from={root}/warmstart",
            "name=short",
            "method=trace_all_layers",
            "rl.steps=2",
            "rl.prompts=8",
            "rl.group_size=4",
            "rl.audit_sequences=32",
            "rl.control_every=0",
            "rl.checkpoint_every=1",
            "rl.save_trajectories_every=1",
        ],
    )
run = os.environ.get("TRACE_RUN")
if run is None:
    warm_start(from_mapping(WarmStartConfig, warm))
    train(from_mapping(RunConfig, short))
    run = f"{root}/short"

# %%
step = open_step(run, stored_steps(run)[-1])
config, trajectories = step.config, step.trajectories
model = with_vocabulary(config.model, config.task)
task = make_task(config.task)
methods = {name: dataclasses.replace(method, format=config.method.format) for name, method in methods.items()}

n = int(np.argmax(trajectories.length))
text = task.tokenizer.decode(trajectories.tokens[n, : trajectories.length[n]])
print(f"{len(trajectories)} sequences sampled with weight version {step.version}; the longest: {text!r}\n")
print("record, arrays [guided layer, sequence, position, ...]:")
for site, record in trajectories.record.sites.items():
    for field in ("row_exponent", "scales", "mantissa", "words"):
        if (array := getattr(record, field)) is not None:
            print(f"  {site:<13}{field:<13}{array.dtype!s:<7}{array.shape}")
print(f"  {'routes':<26}{trajectories.record.routes.dtype!s:<7}{trajectories.record.routes.shape}")

# %% [markdown]
# Every recorded row carries a hash of its token and position and the version of the weights. A record that does not
# belong to the tokens is refused before it can do harm, for example one that is shifted by a token:

# %%
spec = methods["trace_all_layers"].record_spec(model)
ours = rerecord(trajectories, spec)
shifted = dataclasses.replace(ours.record, row_hash=np.roll(ours.record.row_hash, 1, axis=1))
try:
    make_batch(
        dataclasses.replace(ours, record=shifted),
        np.zeros(len(ours), np.float32),
        model=model,
        spec=spec,
        weight_version=step.version,
        replay_routes=True,
    )
except RecordError as error:
    print(f"RecordError: {error}")
else:
    raise AssertionError("a shifted record was accepted")

# %% [markdown]
# ## 3. The trainer, with and without guidance
#
# The same tokens, weights and routes for every method; only what rounds the trainer's values differs. `fp4_rollout`
# trains in BF16, `qat` rounds by itself, `trace` follows the record in the deeper half of the layers,
# `trace_all_layers` everywhere.

# %%
shown = ("fp4_rollout", "qat", "trace", "trace_all_layers")
views = {name: view_as(step, methods[name]) for name in shown}
columns = ("logprob_abs_diff_mean", "logprob_abs_diff_max", "kl_k3", "ess")
print(f"{'':<18}" + "".join(f"{c.removeprefix('logprob_'):>16}" for c in columns) + f"{'codes differ':>16}")
for name, view in views.items():
    differ = np.mean([view.report[site]["code_mismatch"] for site in ("expert_input", "key", "value")])
    print(f"{name:<18}" + "".join(f"{view.mismatch[c]:>16.3g}" for c in columns) + f"{differ:>16.3%}")

# %%
sites = list(views["qat"].report)
fig, axes = plt.subplots(1, len(sites), figsize=(3.2 * len(sites), 3), sharey=True, constrained_layout=True)
for ax, site in zip(axes, sites, strict=True):
    for name, view in views.items():
        ax.plot(100 * view.report[site]["code_mismatch"], marker="o", ms=4, label=name)
    ax.set(title=site, xlabel="layer", xticks=range(model.num_layers))
    ax.grid(alpha=0.3)
axes[0].set_ylabel("codes that differ, %")
axes[-1].legend(fontsize=8)
plt.show()

# %% [markdown]
# A few codes differ in the first layer; each changes what the next layer sees, and the share grows with depth. A
# record of the deeper half repairs its own layers only in part, since their inputs have drifted. A record of every
# layer stops the mismatch where it is born, including at the down-projection inputs, which it does not record.
#
# On the sampled tokens:

# %%
sampled = views["qat"].trajectories.sampled
rollout_logprobs = views["qat"].trajectories.logprobs[sampled]
fig, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharex=True, sharey=True, constrained_layout=True)
for ax, name in zip(axes, ("qat", "trace_all_layers"), strict=True):
    ax.axline((0, 0), slope=1, color="0.7", lw=1)
    ax.scatter(rollout_logprobs, views[name].logprobs[sampled], s=5)
    ax.set(title=name, xlabel="rollout log-prob")
    ax.grid(alpha=0.3)
axes[0].set_ylabel("trainer log-prob")
plt.show()

# %%
gap = {name: view.mismatch["logprob_abs_diff_mean"] for name, view in views.items()}
mismatch = {name: view.report["expert_input"]["code_mismatch"].mean() for name, view in views.items()}
if "TRACE_RUN" not in os.environ:
    assert gap["trace_all_layers"] < gap["qat"] / 4, gap
    assert mismatch["trace_all_layers"] <= mismatch["qat"] / 20, mismatch
    # All sequences were audited, so this is the gap that the run itself measured.
    logged = read_metrics(f"{run}/metrics.jsonl")[-1]["mismatch/logprob_abs_diff_mean"]
    assert np.isclose(gap["trace_all_layers"], logged, rtol=0.05), (gap, logged)

# %% [markdown]
# ## 4. What a record costs
#
# Measured from the arrays. A record is one bit a value and one scale byte a block (16 values in NVFP4, 32 in MXFP4);
# compact scales keep two bits of that byte. One byte a row is the row scale's exponent. Tokens that are padding are
# part of the arrays but never valid.

# %%
records = {name: rerecord(trajectories, methods[name].record_spec(model)).record for name in names}
print(f"{'':<22}{'bits a value':>14}{'+ bytes a row':>15}{'bytes a token':>15}{'log-prob gap':>15}")
for name, record in records.items():
    spec = methods[name].record_spec(model)
    bits = rows = 0.0
    if spec:
        budgets = [site_budget(r, model.row_shape(site)[-1]) for site, r in record.sites.items()]
        bits, rows = np.mean([b.bits_per_value for b in budgets]), budgets[0].row_bytes
    measured = f"{gap[name]:>15.2g}" if name in gap else ""
    print(f"{name:<22}{bits:>14.4g}{rows:>15.0f}{bytes_per_token(record):>15.1f}{measured}")

# %%
fig, ax = plt.subplots(figsize=(7, 3), constrained_layout=True)
guided_names = [name for name in names if methods[name].trainer == "guided"]
ax.barh(guided_names, [bytes_per_token(records[name]) for name in guided_names])
ax.set_xlabel(f"record, bytes a token ({model.num_layers} layers, hidden size {model.hidden_size})")
ax.invert_yaxis()
ax.grid(alpha=0.3, axis="x")
plt.show()

# %% [markdown]
# `expert_input` has a hidden size of 64 here, four blocks, so two-bit scales fill a byte exactly; `key` and `value`
# rows have two blocks, and half of their byte is padding. Realistic sizes have none: 1.5 bits a value for NVFP4,
# 1.25 for MXFP4, 1.125 and 1.0625 with compact scales.

# %%
for fmt in (NVFP4, MXFP4):
    for compact in (False, True):
        spec = dataclasses.replace(
            methods["trace_all_layers"], format=fmt.name, compact_scales=compact
        ).record_spec(model)
        print(f"{fmt.name}{' compact' if compact else '':<8} {spec.bits_per_value(2048)} bits a value")
