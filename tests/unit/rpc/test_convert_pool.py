"""Pools on the wire and back: what is absent stays apart from what is 0."""

import pytest

from kvpool.server.core.specs import FullAttentionSpec, SlidingWindowSpec
from kvpool.server.core.world import Rank, Registration, WorldOptions
from kvpool.server.rpc.convert_pool import config_from_proto, config_to_proto
from kvpool.server.rpc.convert_world import registration_from_proto, registration_to_proto
from support_core import config

RETENTIONS = [None, 0, 16]
SPECS = [FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=9)]


@pytest.mark.parametrize("retention_tokens", RETENTIONS)
def test_pools_keep_how_sparsely_windows_are_cached(retention_tokens: int | None) -> None:
    sparse = config(specs=SPECS, retention_tokens=retention_tokens)
    again = config_from_proto(config_to_proto(sparse, with_none_hash=True))
    assert again.retention_tokens == retention_tokens
    assert not sparse.difference(again)


@pytest.mark.parametrize("retention_tokens", RETENTIONS)
def test_so_do_the_options_of_ranks(retention_tokens: int | None) -> None:
    options = WorldOptions(256, retention_tokens=retention_tokens)
    rank = Registration(Rank(0), 1, "12345678", options, {"layer.0": SPECS[0]}, 2**20)
    assert registration_from_proto(registration_to_proto("m", rank)).options.retention_tokens == retention_tokens
