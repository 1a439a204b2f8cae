"""Token ids encoded in whole buffers equal those encoded one by one."""

from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.token_cbor import encoded_blocks

EDGES = [0, 23, 24, 255, 256, 65_535, 65_536, 2**24, 2**32 - 1]
TOKENS = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**17), st.integers(0, 2**32 - 1))


def one_by_one(token_ids: list[int], block_size: int) -> list[bytes]:
    encoded = list(map(cbor2.dumps, token_ids))
    return [b"".join(encoded[i : i + block_size]) for i in range(0, len(encoded), block_size)]


@given(st.integers(1, 40), st.data())
def test_each_block_encodes_its_own_ids(block_size: int, data: Any) -> None:
    num_blocks = data.draw(st.integers(0, 200 // block_size))
    token_ids = data.draw(st.lists(TOKENS, min_size=num_blocks * block_size, max_size=num_blocks * block_size))
    assert encoded_blocks(token_ids, block_size) == one_by_one(token_ids, block_size)


@pytest.mark.parametrize("count", [1, 4, 40])
def test_ids_of_more_than_32_bits_are_encoded_too(count: int) -> None:
    token_ids = [2**32, 2**64 - 1, -1, 5] * count
    assert encoded_blocks(token_ids, 4) == one_by_one(token_ids, 4)
