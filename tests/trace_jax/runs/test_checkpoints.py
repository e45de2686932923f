"""Checkpoints: exact round trips, retention, and clear refusals that name path, cause and what is left."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from trace_jax.runs import CheckpointError, Checkpoints


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Packed:
    """A pytree dataclass with a static field, as FP4 arrays are."""

    words: jax.Array
    scales: np.ndarray
    format: str = dataclasses.field(metadata={"static": True}, default="nvfp4")


EXTRA = {
    "data": {"next_index": 7},
    "weight_version": 3,
    "note": None,
    "history": [1, 2.5],
    "nested": {"a": {}},
}


def make_state(seed=0):
    key = jax.random.key(seed)
    parameters = nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(seed)))[1]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "parameters": parameters,
        "optimizer": optimizer.init(parameters),
        "packed": Packed(
            words=jax.random.bits(key, (4, 6), jnp.uint32), scales=np.arange(5, dtype=np.uint8) + seed
        ),
        "keys": [key, jax.random.split(key, 3)],
        "bf16": (jax.random.normal(key, (3,), jnp.bfloat16),),
        "count": np.int64(5),
        "absent": None,
    }


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def abstract(state):
    def leaf(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x

    return jax.tree.map(leaf, state)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("template", [make_state, lambda: abstract(make_state(9))])
def test_round_trip_is_exact(folder, template):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(4, make_state(), EXTRA)
    restored = Checkpoints(folder).restore(template())
    assert (restored.step, restored.extra) == (4, EXTRA)
    assert_same(restored.state, make_state())
    assert isinstance(restored.state["packed"].scales, np.ndarray)
    assert isinstance(restored.state["packed"].words, jax.Array)


def test_restores_to_the_template_sharding(folder):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "fsdp"))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", None))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(0, {"w": jnp.ones((4, 2))}, {})
        template = {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=sharding)}
        assert checkpoints.restore(template).state["w"].sharding == sharding


def test_keeps_the_latest(folder):
    with Checkpoints(folder, keep=2) as checkpoints:
        assert (
            checkpoints.restore({}) is None
            and checkpoints.all_steps() == []
            and checkpoints.latest_step() is None
        )
        for step in (0, 5, 10, 20):
            checkpoints.save(step, {"w": jnp.full(3, step)}, {"step": step})
            # A reader of its own sees each as soon as it is complete.
            assert Checkpoints(folder).latest_step() == step
        assert checkpoints.all_steps() == [10, 20]
        assert checkpoints.restore({"w": jnp.zeros(3, int)}).state["w"][0] == 20
        assert checkpoints.restore({"w": jnp.zeros(3, int)}, step=10).extra == {"step": 10}
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; it has 10, 20"):
        Checkpoints(folder).restore({"w": jnp.zeros(3, int)}, step=5)


def test_a_step_saved_again_is_replaced(folder):
    with Checkpoints(folder) as checkpoints:
        for value in (1.0, 2.0):
            checkpoints.save(3, {"w": jnp.full(2, value)}, {"value": value})
        restored = checkpoints.restore({"w": jnp.zeros(2)})
    assert restored.extra == {"value": 2.0} and restored.state["w"][0] == 2.0


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), {**EXTRA, "step": step})
    return folder


def files_of(step):
    return sorted(f.relative_to(step) for f in step.rglob("*") if f.is_file())


@pytest.mark.parametrize("damage", ["deleted", "truncated", "emptied", "flipped"])
def test_every_damaged_file_is_an_error_that_names_it(two_steps, tmp_path, damage):
    """Whatever file of the latest checkpoint is hit, nothing is restored and the one before is still good."""
    count = 0
    for name in files_of(two_steps / "2"):
        if name.name == "checksums.json" and damage == "deleted":
            continue  # below: the checkpoint itself is whole
        folder = tmp_path / str(count)
        shutil.copytree(two_steps, folder)
        file = folder / "2" / name
        data = bytearray(file.read_bytes())
        if damage == "deleted":
            file.unlink()
        elif damage == "truncated":
            file.write_bytes(data[: len(data) // 2])
        elif damage == "emptied":
            file.write_bytes(b"")
        else:
            data[len(data) // 2] ^= 4
            file.write_bytes(data)
        with pytest.raises(CheckpointError) as error:
            Checkpoints(folder).restore(make_state())
        message = str(error.value)
        assert str(folder / "2") in message and "Intact checkpoints: 1." in message
        if name.name != "checksums.json":
            assert str(name) in message
        assert "go on from step 1, delete the folders of later steps" in message
        shutil.rmtree(folder / "2")
        assert Checkpoints(folder).restore(make_state()).step == 1
        count += 1
    assert count > 10


def test_no_intact_checkpoint_left(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "c")
    for step in ("1", "2"):
        (tmp_path / "c" / step / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(
        CheckpointError, match=r"file state/manifest.ocdbt is missing. Intact checkpoints: none.$"
    ):
        Checkpoints(tmp_path / "c").restore(make_state())


def test_killed_before_the_checksums_were_written(two_steps, tmp_path, caplog):
    """Orbax's rename makes a checkpoint complete: it is restored, with a warning."""
    shutil.copytree(two_steps, tmp_path / "c")
    (tmp_path / "c" / "2" / "checksums.json").unlink()
    assert_same(Checkpoints(tmp_path / "c").restore(make_state()).state, make_state(2))
    assert "its files are not verified" in caplog.text


def test_an_error_of_orbax_is_reported_by_its_root_cause(two_steps, monkeypatch):
    def fail(*_):
        try:
            raise OSError("disk on fire")
        except OSError as error:
            raise RuntimeError("Failed to load: " + 10_000 * "state ") from error

    monkeypatch.setattr(ocp, "load_checkpointables", fail)
    with pytest.raises(CheckpointError, match=r"/2 cannot be restored: .*OSError: disk on fire") as error:
        Checkpoints(two_steps).restore(make_state())
    assert "Intact checkpoints: 1." in str(error.value) and len(str(error.value)) < 1000


def test_a_partial_template_restores_its_part_only(two_steps):
    template = {"parameters": make_state()["parameters"]}
    with pytest.raises(CheckpointError, match="does not fit"):
        Checkpoints(two_steps).restore(template)
    restored = Checkpoints(two_steps).restore(template, partial=True)
    assert_same(restored.state, {"parameters": make_state(2)["parameters"]})
    with pytest.raises(
        CheckpointError, match=r"other is absent in the checkpoint, float32\[1\] in the state"
    ):
        Checkpoints(two_steps).restore({"other": jnp.zeros(1)}, partial=True)


def test_a_template_without_devices_is_refused(two_steps):
    mesh = jax.sharding.AbstractMesh((1,), ("data",))
    leaf = jax.ShapeDtypeStruct((3,), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(CheckpointError, match=r"state\['bf16'\]\[0\] is sharded over a mesh without devices"):
        Checkpoints(two_steps).restore({**make_state(), "bf16": (leaf,)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"bf16": (jnp.zeros(4, jnp.bfloat16),)},
            r"bf16\.0 is bfloat16\[3\] in the checkpoint, bfloat16\[4\] in",
        ),
        ({"bf16": (jnp.zeros(3),)}, r"bf16\.0 is bfloat16\[3\] in the checkpoint, float32\[3\] in the state"),
        (
            {"extra_layer": jnp.zeros(2)},
            r"extra_layer is absent in the checkpoint, float32\[2\] in the state",
        ),
        ({"keys": None}, r"keys\.0 is uint32\[2\] in the checkpoint, absent in the state"),
    ],
)
def test_a_template_that_does_not_fit_names_the_parameter(two_steps, change, message):
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoints(two_steps).restore({**make_state(), **change})
    assert "does not fit the state" in str(error.value) and len(str(error.value)) < 2000


@pytest.mark.parametrize(
    ("state", "extra", "message"),
    [
        ({"step": 3}, {}, r"state\['step'\] is 3 \(int\); expected an array"),
        ({"w": jnp.ones(1)}, {"rng": jnp.ones(2)}, "extra data of step 0 cannot be stored as JSON"),
    ],
)
def test_save_refuses_what_it_cannot_hold(folder, state, extra, message):
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.save(0, state, extra)
    assert not folder.exists()


def test_keep_is_checked(folder):
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpoints(folder, keep=0)


def test_a_reader_leaves_an_unfinished_save_alone_and_the_writer_removes_it(two_steps, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(two_steps, folder)
    unfinished = folder / "3.orbax-checkpoint-tmp"
    shutil.copytree(folder / "2", unfinished)
    (unfinished / "_CHECKPOINT_METADATA").write_text("{")
    reader = Checkpoints(folder)
    assert reader.all_steps() == [1, 2] and reader.restore(make_state()).step == 2
    assert unfinished.exists()
    with Checkpoints(folder) as writer:
        writer.save(3, make_state(3), {"step": 3})
    assert not unfinished.exists()
    assert reader.restore(make_state()).extra == {"step": 3}
    assert json.loads((folder / "3" / "checksums.json").read_text())
