"""Trajectories on disk: read back as they were written, or refused with one message."""

import io
import json
import zipfile

import numpy as np
import pytest

from tests.trace_jax import small
from trace_jax.guidance import RecordError
from trace_jax.rollout import load_trajectories, save_trajectories

NAME = "trace_all_sites"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "000001.npz"
    save_trajectories(path, small.rollout(NAME))
    return path


@pytest.fixture
def rewrite(saved, tmp_path):
    """Writes the file again after `change(arrays, static)`, which alters both in place."""

    def write(change):
        with np.load(saved) as file:
            arrays = dict(file)
        static = json.loads(str(arrays.pop("static")))
        change(arrays, static)
        path = tmp_path / "changed.npz"
        np.savez(path, static=np.asarray(json.dumps(static)), **arrays)
        return path

    return write


def refuse(path, reason):
    """One message: the file, what to do, and the reason."""
    with pytest.raises(RecordError, match=reason) as caught:
        load_trajectories(path)
    assert str(caught.value).startswith(f"{path} is damaged") and "sample it again" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["bf16", "qat", "trace", NAME, "trace_compact_scales", "trace_full", "trace_scale"]
)
def test_reads_what_was_written(tmp_path, name):
    save_trajectories(tmp_path / "t.npz", small.rollout(name))
    assert small.equal_trees(load_trajectories(tmp_path / "t.npz"), small.rollout(name))


def test_a_rewritten_file_is_accepted(rewrite):
    """What is refused below is refused for its change, not for how it was written."""
    assert small.equal_trees(load_trajectories(rewrite(lambda arrays, static: None)), small.rollout(NAME))


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_trajectories(tmp_path / "nowhere.npz")


@pytest.mark.parametrize("size", [0, 1, 100, 5000, -1])
def test_refuses_a_truncated_file(saved, tmp_path, size):
    (tmp_path / "t.npz").write_bytes(saved.read_bytes()[:size])
    refuse(tmp_path / "t.npz", "BadZipFile")


def test_refuses_files_of_another_kind(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros(3))
    refuse(tmp_path / "t.npy", "BadZipFile")
    np.savez(tmp_path / "t.npz", w=np.zeros(3))
    refuse(tmp_path / "t.npz", "KeyError: 'static'")
    np.savez(tmp_path / "t.npz", static=np.asarray({"format_version": 1}, dtype=object))
    refuse(tmp_path / "t.npz", "Object arrays")


@pytest.mark.parametrize("member", [b"", b"text", b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i4'("])
def test_refuses_a_member_that_is_no_array(saved, tmp_path, member):
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(tmp_path / "t.npz", "w") as new:
        for name in old.namelist():
            new.writestr(name, member if name == "tokens.npy" else old.read(name))
    refuse(tmp_path / "t.npz", "Error")


def test_a_flipped_bit_is_refused_or_changes_nothing(saved, tmp_path, rng):
    whole, path = saved.read_bytes(), tmp_path / "flipped.npz"
    directory = whole.index(b"PK\x01\x02")  # the zip's own bookkeeping, a small part that fails in other ways
    refused = 0
    for byte in (*rng.integers(len(whole), size=60), *rng.integers(directory, len(whole), size=60)):
        flipped = bytearray(whole)
        flipped[byte] ^= 1 << rng.integers(8)
        path.write_bytes(flipped)
        try:
            assert small.equal_trees(load_trajectories(path), small.rollout(NAME)), byte
        except RecordError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 60


def test_a_damaged_header_that_asks_for_fewer_bytes(saved, tmp_path):
    """The checksum is compared although nothing reads to the end of the array."""
    header = b"'shape': (6, 16)"
    stored = io.BytesIO()
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(stored, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert header in stored.getvalue()
    (tmp_path / "t.npz").write_bytes(stored.getvalue().replace(header, b"'shape': (5, 16)"))
    refuse(tmp_path / "t.npz", "Bad CRC-32")


ARRAYS = [
    *("tokens", "prompt_length", "length", "logprobs"),
    *("record/routes", "record/row_hash", "record/weight_version"),
    *("sites/key/row_exponent", "sites/key/scales", "sites/down_input/mantissa"),
    *("audit/value/words", "audit/value/scales", "audit/down_input/row_exponent"),
]
CHANGES = {
    "dtype": lambda a: a.astype(np.float64),
    "byte order": lambda a: a.astype(a.dtype.newbyteorder(">") if a.itemsize > 1 else np.int8),
    "fewer sequences": lambda a: a[:, :-1] if a.ndim > 2 else a[:-1],
    "longer last axis": lambda a: np.concatenate([a, a[..., -1:]], axis=-1),
    "another axis": lambda a: a[..., None],
    "no axes": lambda a: a.ravel()[0],
    "text": lambda a: np.asarray("tokens"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_refuses_a_missing_array(rewrite, name):
    refuse(rewrite(lambda arrays, static: arrays.pop(name)), rf"{name.split('/')[-1]}.* missing")


def test_refuses_an_unknown_array(rewrite):
    changed = rewrite(lambda arrays, static: arrays.update({"sites/query/scales": np.zeros(3)}))
    refuse(changed, r"unknown arrays \['sites/query/scales'\]")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ARRAYS)
def test_refuses_another_dtype_or_shape(rewrite, name, change):
    refuse(
        rewrite(lambda arrays, static: arrays.update({name: CHANGES[change](arrays[name])})),
        "one expert twice" if (name, change) == ("record/routes", "longer last axis") else "expected",
    )


@pytest.mark.parametrize(
    "name, at, value, reason",
    [
        ("tokens", (1, 2), 16, "row hash .* sequence 1, position 2"),
        ("length", 0, 6, "are shifted"),
        ("length", 0, 99, "not ordered within the 16 positions"),
        ("prompt_length", 0, 17, "not ordered"),
        ("prompt_length", 0, -1, "not ordered"),
        ("record/weight_version", (0, 15), 3, "weight version differs"),
        ("record/routes", (0, 0, 0), 255, "are shifted"),
    ],
)
def test_refuses_values_that_contradict_the_rest(rewrite, name, at, value, reason):
    def change(arrays, static):
        assert (arrays[name][at] != value).any()
        arrays[name][at] = value

    refuse(rewrite(change), reason)


@pytest.mark.parametrize(
    "path, value, reason",
    [
        ("format_version", 2, "record format version 2, this code reads 1"),
        ("format_version", None, "record format version None"),
        ("audit_rows", None, r"static\.audit_rows: required"),
        ("audit_rows", 3, r"static\.audit_rows: expected tuple"),
        ("audit_rows", [0, 1], r"expected uint8\[3, 2, 16, "),
        ("audit_rows", [0, 1, 2, 3, 4, 6], "lie outside the 6 sequences"),
        ("audit", None, r"unknown arrays \['audit/down_input"),
        ("audit", ["key"], r"static\.audit: expected"),
        ("audit.key", None, "unknown arrays"),
        ("audit.key", "fp8", "unknown FP4 format 'fp8'"),
        ("audit.key", "mxfp4", r"audit/key\.scales is"),
        ("audit.query", "nvfp4", r"audit/query\.row_exponent is missing"),
        ("sites", None, r"static\.sites: required"),
        ("sites", [], r"static\.sites: expected"),
        ("sites.key", None, "expected one spec of these sites"),
        ("sites.key", "key", r"static\.sites\.key: expected a mapping"),
        ("sites.key.site", None, r"static\.sites\.key\.site: required"),
        ("sites.key.site", "value", "taken at 'value'"),
        ("sites.key.spec", None, r"static\.sites\.key\.spec: required"),
        ("sites.key.spec.layers", None, r"spec\.layers: required"),
        ("sites.key.spec.layers", "all", r"spec\.layers: expected tuple"),
        ("sites.key.spec.rounding", 1, r"unknown key 'static\.sites\.key\.spec\.rounding'"),
        ("sites.key.spec.mode", "exact", "guidance mode is 'exact'"),
        ("sites.key.spec.mode", "full", "expected one spec of these sites"),
        ("*.mode", "full", r"mantissa is present, but mode 'full' has none|words is missing"),
        ("*.mode", "scale", r"mantissa is present, but mode 'scale' has none"),
        ("*.compact_scales", True, r"\.scales is uint8"),
        ("*.format", "mxfp4", r"\.scales is uint8"),
        ("*.layers", [0, 1], r"row_exponent is uint8\[3, .*expected uint8\[2, "),
        ("*.layers", [1, 2, 3], "indices from 0 to 2"),
    ],
)
def test_refuses_a_description_that_does_not_fit(rewrite, path, value, reason):
    """`*` is every site's spec; None takes the key out."""

    def change(arrays, static):
        *way, last = path.split(".")
        if way == ["*"]:
            nodes = [site["spec"] for site in static["sites"].values()]
        else:
            nodes = [static]
            for key in way:
                nodes = [nodes[0][key]]
        for node in nodes:
            node.pop(last, None)
            if value is not None:
                node[last] = value

    refuse(rewrite(change), reason)


@pytest.mark.parametrize("static", ["[]", "null", "3", '"text"', "{", "", "[" * 100_000])
def test_refuses_a_description_that_is_no_mapping(saved, tmp_path, static):
    with np.load(saved) as file:
        arrays = dict(file) | {"static": np.asarray(static)}
    np.savez(tmp_path / "t.npz", **arrays)
    refuse(tmp_path / "t.npz", "format version None|JSONDecodeError|RecursionError")
