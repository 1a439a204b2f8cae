"""Pools and steps have the same names and numbers in the protos and in the core, and round-trip."""

from dataclasses import replace

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import MAX_TOKENS
from kvpool.core.specs.pool_config import HashScheme, KeyForm, PoolConfig
from kvpool.core.steps.columns import Operation, Outcome
from kvpool.v1 import pool_pb2, step_pb2
from kvpool.wire.pools import config_from_proto, config_to_proto
from support.core import config


def over_the_wire(declared: PoolConfig) -> PoolConfig:
    encoded = config_to_proto(declared, with_none_hash=True).SerializeToString()
    return config_from_proto(pool_pb2.PoolConfig.FromString(encoded))


@pytest.mark.parametrize("num_tokens", [0, 1, MAX_TOKENS])
def test_the_maximum_of_in_flight_tokens_round_trips(num_tokens: int) -> None:
    assert over_the_wire(config(max_in_flight_tokens=num_tokens)).max_in_flight_tokens == num_tokens


@pytest.mark.parametrize("allowed", [False, True])
def test_the_permission_of_too_few_blocks_round_trips(allowed: bool) -> None:  # noqa: FBT001 - a parameter
    assert over_the_wire(config(allow_too_few_blocks=allowed)).allow_too_few_blocks is allowed


def test_a_hash_scheme_round_trips() -> None:
    scheme = HashScheme("own", 9, b"x", KeyForm.PLAIN, num_lookahead_tokens=3)
    assert over_the_wire(config(hash_scheme=scheme)).hash_scheme == scheme


def test_too_many_tokens_in_flight_are_refused_by_name() -> None:
    for num_tokens in (-1, MAX_TOKENS + 1):
        with pytest.raises(InvalidArgumentError) as raised:
            replace(config(), max_in_flight_tokens=num_tokens).check()
        assert raised.value.field == "config.max_in_flight_tokens"


def test_operations_and_outcomes_have_the_numbers_of_the_protos() -> None:
    assert {f"OPERATION_{each.name}": int(each) for each in Operation} == {
        name: number for name, number in step_pb2.Operation.items() if number
    }
    # 0 in the proto, UNSPECIFIED, means OK.
    assert {f"OUTCOME_{each.name}": int(each) for each in Outcome if each} == {
        name: number for name, number in step_pb2.Outcome.items() if number
    }
