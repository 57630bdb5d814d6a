"""Best fit, against a list that is searched from end to end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.blocks import BestFit, Block

sizes = st.integers(1, 12).map(lambda n: 512 * n)


@given(st.lists(st.tuples(sizes, st.sampled_from(["add", "remove", "find"])), max_size=60))
def test_it_agrees_with_a_naive_list(steps: list[tuple[int, str]]) -> None:
    index, naive, address = BestFit(), list[Block](), 0
    for size, what in steps:
        if what == "add":
            address += 1 << 20
            block = Block(address if len(naive) % 2 else (1 << 40) - address, size, 0)
            index.add(block)
            naive.append(block)
        elif what == "remove" and naive:
            block = naive.pop(size % len(naive))
            index.remove(block)
            assert block.shelf is None
        else:
            fits = sorted((b.size, b.ptr) for b in naive if b.size >= size)
            found = index.find(size)
            assert (found and (found.size, found.ptr)) == (fits[0] if fits else None)
            assert [(b.size, b.ptr) for b in index.from_size(size)] == fits
        assert len(index) == len(naive) and set(index) == set(naive)
        assert index.nbytes == sum(b.size for b in naive)
        assert index.largest() == max((b.size for b in naive), default=0)
        index.check()


def test_a_block_that_is_not_there_cannot_be_taken() -> None:
    index = BestFit()
    with pytest.raises(KeyError):
        index.remove(Block(0, 512, 0))


def test_addresses_up_to_64_bits_do_not_disturb_the_sizes() -> None:
    index = BestFit()
    high, low = Block((1 << 64) - 512, 512, 0), Block(0, 1024, 0)
    index.add(low)
    index.add(high)
    assert index.find(512) is high and index.find(513) is low


def test_check_notices_a_size_that_changed() -> None:
    index = BestFit()
    block = Block(0, 512, 0)
    index.add(block)
    block.size = 1024
    with pytest.raises(AssertionError):
        index.check()
