"""Token ids are checked where they enter: a refusal names the index and changes nothing."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from kvpool.client import InvalidArgumentError, Request, Session, connect
from support.server import pool_config


class Integer:
    """An integer of another library."""

    def __index__(self) -> int:
        return 7


@pytest.fixture
def session() -> Session:
    client = connect("embedded:")
    client.create_pool(pool_config())
    return client.open_session("m")


@pytest.fixture(name="running")
def fixture_running(session: Session) -> list[Request]:
    requests = [session.request(f"r{i}", range(5)) for i in range(3)]
    for request in requests:
        session.admit(request)
    return requests


def decode(session: Session, running: list[Request], tokens: list[int]) -> None:
    with session.step() as step:
        step.decode(running, tokens)


CALLS: list[Callable[[Session, list[Request], list[int]], object]] = [
    lambda session, _, tokens: session.request("s", tokens),
    lambda _, running, tokens: running[0].append(tokens),
    decode,
]


@pytest.mark.parametrize("bad", [None, True, -1, 2**32, 1.0, [1], "1"], ids=repr)
@pytest.mark.parametrize("call", CALLS, ids=["request", "append", "decode"])
def test_a_bad_token_is_refused_by_its_index(
    session: Session,
    running: list[Request],
    call: Callable[[Session, list[Request], list[int]], object],
    bad: int,
) -> None:
    with pytest.raises(InvalidArgumentError, match="is not an integer in") as caught:
        call(session, running, [1, 2, bad])
    assert caught.value.field == "token_ids[2]"
    assert [request.token_ids for request in running] == [list(range(5))] * 3
    assert session.sequence == 3


@pytest.mark.parametrize("call", CALLS, ids=["request", "append", "decode"])
def test_every_token_id_of_32_bits_is_accepted(
    session: Session,
    running: list[Request],
    call: Callable[[Session, list[Request], list[int]], object],
) -> None:
    call(session, running, [0, 2**32 - 1, Integer()])  # type: ignore[list-item]


@pytest.mark.parametrize("make", [np.array, torch.tensor, iter, tuple], ids=["numpy", "torch", "iterator", "tuple"])
@pytest.mark.parametrize("count", [3, 8, 70])
def test_token_ids_of_other_types_become_plain_integers(
    session: Session, running: list[Request], make: Callable[[list[int]], Sequence[int]], count: int
) -> None:
    """Some counts fill blocks, whose hashes take plain integers only."""
    ids = list(range(count))
    assert session.admit(session.request("r", make(ids)))
    running[0].append(make(ids))
    assert running[0].token_ids == [*range(5), *ids]
    with session.step() as step:
        step.decode(running[1:], make([7, 8]))
    found = [token_id for request in running for token_id in request.token_ids]
    assert found == [*range(5), *ids, *range(5), 7, *range(5), 8]
    assert {type(token_id) for token_id in found} == {int}
