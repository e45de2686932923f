"""A short RL run from every family's checkpoint: guidance closes the gap, and every row is accounted for."""

import numpy as np
import pytest

from kernels_pallas.arrays import Fp4Array
from tests.experiments.settings import composed
from tests.trace_jax.families import FAMILIES, ROOT
from trace_jax.config import from_mapping
from trace_jax.quant import SITES
from trace_jax.rl.run import RunConfig, make_loop, train, with_checkpoint

pytestmark = pytest.mark.slow

SHORT = (
    "rl.steps=2",
    "rl.prompts=4",
    "rl.group_size=4",
    "rl.max_new_tokens=16",
    "rl.decode_chunk=8",
    "rl.audit_sequences=2",
    "rl.control_every=1",
)


@pytest.fixture(scope="module", params=FAMILIES)
def run(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    overrides = (f"root={root}", f"init_from={ROOT / request.param}", "method=trace_all_sites", *SHORT)
    config = with_checkpoint(from_mapping(RunConfig, composed("train", *overrides)))
    loop = make_loop(config)
    return loop, train(config, loop=loop).rows


def test_guidance_closes_the_gap(run):
    loop, rows = run
    assert len(rows) == 2
    for row in rows:
        guided, control = (row[f"{part}mismatch/logprob_abs_diff_mean"] for part in ("", "control/"))
        assert guided < 0.35 * control and control > 0.02
        for site in loop.spec.sites:
            mismatch = row[f"alignment/{site}/code_mismatch"]
            assert mismatch <= 0.2 * row[f"control/alignment/{site}/code_mismatch"]


def test_every_row_is_guided_and_routes_are_replayed(run):
    loop, rows = run
    model, t = loop.model, loop.trajectories
    values_of = {site: int(np.prod(model.row_shape(site)[:-1])) for site in SITES}
    per_token = sum(len(model.site_layers(site)) * values_of[site] for site in loop.spec.sites)
    assert rows[-1]["guidance/rows_guided"] == t.fed.sum() * per_token
    assert rows[-1]["guidance/rows_unguided"] == 0
    assert set(loop.spec.sites) == {site for site in SITES if model.site_layers(site)}
    assert t.record.routes.shape[0] == len(model.layers_of("moe"))
    # With the rollout's codes at every site the trainer's own routers choose what the rollout's chose.
    assert rows[0]["router/agreement"] > 0.98


def test_experts_and_cache_are_fp4_in_every_family(run):
    loop, _ = run
    rollout = loop.history[loop.version]
    for name in ("gate_up", "down"):
        assert isinstance(rollout["moe"][name].get_value(), Fp4Array)
    assert all(codes.format.name == "nvfp4" for codes in loop.trajectories.audit.values())
    assert {site for site in SITES if loop.model.site_layers(site)} == set(loop.trajectories.audit)
