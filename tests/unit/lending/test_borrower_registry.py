"""The registry does what its transcripts show; they cite the rules of lending/borrower_registry.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from kvpool.core.errors import ExhaustedError
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import MAX_MAPPING_PROCESSES, MappingProcess
from kvpool.lending.borrower_registry import MAX_CONNECTIONS, MAX_SESSIONS, MAX_USES, BorrowerRegistry, Link
from support.borrower_transcript import BorrowerTranscript
from support.transcripts import check

PATHS: Final = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_registry_does_what_the_transcript_shows(path: Path) -> None:
    check(path, BorrowerTranscript().execute)


@pytest.fixture(name="registry")
def fixture_registry() -> BorrowerRegistry:
    registry = BorrowerRegistry(lambda _: None, lambda _: None)
    registry.begin(5)
    registry.open(5)
    return registry


def link() -> Link:
    return Link(lambda _: None)


@pytest.mark.parametrize("pids", [[3] * MAX_USES, range(3, MAX_CONNECTIONS + 3)], ids=["process", "lender"])
def test_rule_8_connections_are_limited_and_a_known_one_may_be_replaced(
    registry: BorrowerRegistry, pids: Sequence[int]
) -> None:
    for i, pid in enumerate(pids):
        last = registry.connect(pid, 100, f"use-{i}", "engine", link())
    before = registry.all()
    with pytest.raises(ExhaustedError) as caught:
        registry.connect(pids[0], 100, "another", "engine", link())
    assert (caught.value.reason, caught.value.retry_seconds) == ("TOO_MANY_CONNECTIONS", 1.0)
    assert registry.all() == before
    assert registry.connect(last.pid, 100, last.client_id, "engine", link()) is last
    registry.remove_exited(last)
    registry.connect(pids[0], 100, "another", "engine", link())


def test_rule_8_a_process_names_a_limited_number_of_sessions(registry: BorrowerRegistry) -> None:
    leases = [TableLease(5, SessionNumber(number)) for number in range(1, MAX_SESSIONS + 2)]
    connection = link()
    borrower = registry.connect(1, 100, "id", "engine", connection)
    for lease in leases[:-1]:
        registry.bind(borrower, connection, lease)
    with pytest.raises(ExhaustedError) as caught:
        registry.bind(borrower, connection, leases[-1])
    assert (caught.value.reason, caught.value.retry_seconds) == ("TOO_MANY_SESSIONS", 1.0)
    assert borrower.leases == {*leases[:-1]}
    registry.bind(borrower, connection, leases[0])  # it is named already


def test_the_processes_that_map_the_memory_are_named(registry: BorrowerRegistry) -> None:
    for pid in range(1, MAX_MAPPING_PROCESSES + 3):
        connection = link()
        borrower = registry.connect(pid, 100, "id", "engine", connection)
        if pid > 1:
            registry.map(borrower, connection, 5, lambda: None)
    assert registry.num_mapping == MAX_MAPPING_PROCESSES + 1
    assert registry.mapping_processes == tuple(
        MappingProcess(pid, "engine") for pid in range(3, MAX_MAPPING_PROCESSES + 3)
    )


def test_another_process_with_the_same_id_is_not_mistaken_for_an_earlier_one(registry: BorrowerRegistry) -> None:
    first = registry.connect(1, 100, "id", "engine", link())
    assert registry.connect(1, 100, "id", "engine", link()) is first
    assert registry.connect(1, 200, "id", "engine", link()) is not first
