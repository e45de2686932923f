"""A record is used with exactly the rows it was taken from, or refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace_jax import small
from trace_jax.guidance import RecordError, check_record, check_routes, row_hash
from trace_jax.quant import SITES

NAME = "trace_all_sites"
ROW_SHAPES = {site: small.MODEL.row_shape(site) for site in SITES}
replace = dataclasses.replace


def check(record, *, spec=None, version=3, tokens=None, name=NAME):
    trajectories = small.rollout(name)
    check_record(
        record,
        spec=spec or small.method(name).record_spec(small.MODEL),
        row_shapes=ROW_SHAPES,
        tokens=trajectories.tokens if tokens is None else tokens,
        fed=trajectories.fed,
        weight_version=np.full(trajectories.tokens.shape, version, np.int32),
    )


def record_of(name=NAME):
    return small.rollout(name).record


def with_site(site, **changes):
    record = record_of()
    return replace(record, sites=record.sites | {site: replace(record.sites[site], **changes)})


@pytest.mark.parametrize("name", ["trace", "trace_all_layers", "trace_all_sites", "trace_compact_scales"])
def test_accepts_its_own_record(name):
    check(record_of(name), name=name)


def test_accepts_no_record_where_none_is_expected():
    trajectories = small.rollout("qat")
    check_record(
        trajectories.record,
        spec=None,
        row_shapes=ROW_SHAPES,
        tokens=trajectories.tokens,
        fed=trajectories.fed,
        weight_version=np.full(trajectories.tokens.shape, 3, np.int32),
    )


def test_refuses_a_record_shifted_by_one_token():
    shifted = jax.tree.map(lambda leaf: np.roll(leaf, 1, axis=2), record_of().sites)
    record = replace(record_of(), sites=shifted, row_hash=np.roll(record_of().row_hash, 1, axis=1))
    with pytest.raises(
        RecordError, match=r"row hash .* differs in \d+ of .* first at sequence 0, position 0"
    ):
        check(record)


def test_refuses_rows_of_other_tokens():
    tokens = small.rollout(NAME).tokens.copy()
    tokens[4, 2] += 1
    with pytest.raises(RecordError, match=r"row hash .* differs in 1 of .* first at sequence 4, position 2"):
        check(record_of(), tokens=tokens)


def test_refuses_records_exchanged_between_sequences():
    record = record_of()
    with pytest.raises(RecordError, match="records are shifted or foreign"):
        check(replace(record, row_hash=record.row_hash[::-1]))


def test_refuses_a_missing_row():
    hashes = record_of().row_hash.copy()
    hashes[2, 5] = 0
    with pytest.raises(RecordError, match="first at sequence 2, position 5: record 0"):
        check(replace(record_of(), row_hash=hashes))


def test_refuses_another_site():
    record = record_of()
    with pytest.raises(
        RecordError, match="the record under 'key' was taken at 'value'; sites must not be exchanged"
    ):
        check(replace(record, sites=record.sites | {"key": record.sites["value"]}))


def test_refuses_missing_and_additional_sites():
    record = record_of()
    fewer = {site: value for site, value in record.sites.items() if site != "value"}
    with pytest.raises(RecordError, match=r"record has sites \['down_input', 'expert_input', 'key'\]"):
        check(replace(record, sites=fewer))
    with pytest.raises(RecordError, match="the trainer guides"):
        check(record, name="trace_all_layers")
    with pytest.raises(RecordError, match=r"the trainer guides \[\]"):
        check_record(
            record,
            spec=None,
            row_shapes=ROW_SHAPES,
            tokens=small.rollout(NAME).tokens,
            fed=small.rollout(NAME).fed,
            weight_version=np.full(record.row_hash.shape, 3, np.int32),
        )


def test_refuses_another_weight_version():
    with pytest.raises(
        RecordError, match=r"weight version differs .* record 3, expected 4; records come from other"
    ):
        check(record_of(), version=4)


def test_refuses_one_row_of_another_version():
    versions = record_of().weight_version.copy()
    versions[1, 4] = 2
    with pytest.raises(
        RecordError, match=r"weight version differs in 1 of .* sequence 1, position 4: record 2"
    ):
        check(replace(record_of(), weight_version=versions))


def test_refuses_another_format_version():
    with pytest.raises(RecordError, match="record format version 2, this code reads 1"):
        check(replace(record_of(), format_version=2))


@pytest.mark.parametrize(
    "changes", [{"mode": "full"}, {"compact_scales": True}, {"format": "mxfp4"}, {"layers": (0, 1)}]
)
def test_refuses_another_spec(changes):
    spec = replace(small.method(NAME).record_spec(small.MODEL), **changes)
    with pytest.raises(RecordError, match=r"was taken under .* the trainer expects"):
        check(record_of(), spec=spec)


@pytest.mark.parametrize("field", ["row_exponent", "scales", "mantissa"])
@pytest.mark.parametrize("site", ["expert_input", "down_input", "key", "value"])
def test_refuses_wrong_shape_dtype_and_missing_field(site, field):
    value = getattr(record_of().sites[site], field)
    for wrong, found in (
        (value[:-1], rf"{site}\.{field} is uint8"),
        (value[:, :, :-1], rf"{site}\.{field} is uint8"),
        (value[..., :1], rf"{site}\.{field} is uint8"),
        (value.astype(np.int32), rf"{site}\.{field} is int32"),
        (None, rf"{site}\.{field} is missing"),
    ):
        if wrong is not None and wrong.shape == value.shape and wrong.dtype == value.dtype:
            continue
        with pytest.raises(RecordError, match=found):
            check(with_site(site, **{field: wrong}))


def test_refuses_a_field_that_the_mode_has_not():
    words = np.zeros((1,), np.uint32)
    with pytest.raises(RecordError, match=r"key\.words is present, but mode 'mantissa' has none"):
        check(with_site("key", words=words))


@pytest.mark.parametrize("field", ["row_hash", "weight_version"])
def test_refuses_wrong_shape_and_dtype_of_the_keys(field):
    value = getattr(record_of(), field)
    for wrong in (value[:, :-1], value.astype(np.int64)):
        with pytest.raises(RecordError, match=rf"is {wrong.dtype}.*expected {value.dtype}"):
            check(replace(record_of(), **{field: wrong}))


TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=24)


@given(TOKENS)
def test_row_hash_sees_a_shift(tokens):
    """Even of a sequence of one token over and over: the position is in the hash."""
    tokens = np.asarray(tokens, np.int32)
    positions = np.arange(len(tokens), dtype=np.int32)
    right = row_hash(tokens, positions)
    assert right.dtype == np.uint32 and (right != 0).all()
    assert not (np.roll(right, 1) == right).any()
    # A record taken one position later: same tokens, other positions.
    assert not (row_hash(tokens, positions + 1) == right).any()


@given(TOKENS, st.integers(0, 2**20))
def test_row_hash_is_the_same_on_host_and_device(tokens, start):
    tokens = np.resize(np.asarray(tokens, np.int32), 24)
    positions = np.arange(24, dtype=np.int32) + start
    assert np.array_equal(row_hash(jnp.asarray(tokens), jnp.asarray(positions)), row_hash(tokens, positions))


def test_row_hash_has_no_collisions_among_the_rows_of_a_batch():
    tokens, positions = np.meshgrid(np.arange(512, dtype=np.int32), np.arange(512, dtype=np.int32))
    assert len(np.unique(row_hash(tokens, positions))) > 512 * 512 - 40  # birthday bound: about 8


def test_routes_that_no_router_chose_are_refused():
    fed = np.array([[True, True, False]])
    good = np.array([[[[0, 1], [2, 3], [255, 255]]]], np.uint8)

    def check(routes, experts=4):
        check_routes(routes, num_layers=1, num_experts=experts, k=2, fed=fed)

    check(good)
    wrong = {
        r"uint8\[1, 1, 2, 2\], expected unsigned integers \[1, 1, 3, 2\]": good[:, :, :2],
        r"int32": good.astype(np.int32),
        r"shifted": np.roll(good, 1, axis=2),
        r"one expert twice": np.where(good == 1, 0, good).astype(np.uint8),
    }
    for message, routes in wrong.items():
        with pytest.raises(RecordError, match=message):
            check(routes)
    with pytest.raises(RecordError, match="name expert 3, the model has 3 experts"):
        check(good, experts=3)
