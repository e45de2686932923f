"""Pages are free or held, as often as they are shared, and never lost."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.rollout.pages import PagePool


def test_pages_come_back_when_their_last_holder_lets_go():
    pool = PagePool(3)
    first = pool.take(2)
    assert pool.free == 1 and pool.take(2) is None and pool.free == 1
    pool.share(first)
    pool.release(first)
    assert pool.free == 1
    pool.check([first])
    pool.release(first)
    assert pool.free == 3 and sorted(pool.take(3)) == [0, 1, 2]


def test_misuse_is_refused():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.release([page])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([page])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share([page])
    with pytest.raises(AssertionError, match="pages were lost"):
        pool.check([[page]])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_any_order_of_calls_agrees_with_counting(calls):
    pool, holders = PagePool(6), []
    for call, number in calls:
        if call == "take":
            taken = pool.take(number)
            assert (taken is None) == (number > 6 - len({p for pages in holders for p in pages}))
            holders += [taken] if taken else []
        elif holders:
            pages = holders[number % len(holders)]
            if call == "share":
                pool.share(pages)
                holders.append(list(pages))
            else:
                pool.release(pages)
                holders.remove(pages)
        counts = collections.Counter(page for pages in holders for page in pages)
        assert pool.free == 6 - len(counts)
        pool.check(holders)
