import io
import json
from typing import TypeVar

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvpool.cli import blocks, pools, sessions
from kvpool.cli.tables import Column, make_table, print_json
from kvpool.v1.admin_pb2 import BlockInfo, BlockState
from kvpool.v1.pool_pb2 import HostMemoryInfo, PoolConfig, PrefixCacheCounters
from support.operator import pool_info, session_info

RowT = TypeVar("RowT")


def printed(columns: tuple[Column[RowT], ...], row: RowT, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(make_table(columns, [row], width), highlight=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def cells(columns: tuple[Column[RowT], ...], row: RowT) -> list[str]:
    return [column.cell(row) for column in columns]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal_and_cut_names_but_not_figures(width: int) -> None:
    session = session_info(
        session_number=12_345, client_name="scheduler-模型-" * 20, pool_name="p" * 128, sequence=987_654_321,
        held_blocks=(123_456, 7), requests=9999, running_requests=8888,
    )  # fmt: skip
    lines = printed(sessions.COLUMNS, session, width)
    assert len(lines) == 2
    assert all(cell_len(line) <= width for line in lines)
    for figure in ("12345", "8,888", "1,111", "123,456+7", "987,654,321", "…"):
        assert figure in lines[1]
    lines = printed(pools.COLUMNS, pool_info(name="x" * 128, num_blocks=2**31 - 1), width)
    assert all(cell_len(line) <= width for line in lines)
    assert "2,147,483,646" in lines[1]


def test_the_pool_table_has_a_column_for_quarantined_blocks_if_there_are_any() -> None:
    assert pools.pool_columns([pool_info()]) is pools.COLUMNS
    infos = [pool_info(), pool_info(quarantined_blocks=1234, quarantined_sessions=2)]
    added = pools.pool_columns(infos)[-1]
    assert (added.title, [added.cell(info) for info in infos]) == ("QUARANTINED", ["0", "1,234"])


def test_the_pool_table_has_columns_for_host_memory_if_a_pool_has_some() -> None:
    config, hits = PoolConfig(num_host_blocks=1000), PrefixCacheCounters(hits_tokens=30, host_hits_tokens=10)
    host = pool_info(config=config, host_memory=HostMemoryInfo(cached_blocks=400), prefix_cache=hits)
    infos = [pool_info(), pool_info(config=config, host_memory=HostMemoryInfo()), host]
    found = {column.title: [column.cell(info) for info in infos] for column in pools.pool_columns(infos)[-2:]}
    assert found == {"HOST CACHED": ["-", "0 of 1,000", "400 of 1,000"], "OF HITS": ["-", "-", "33.3%"]}


def test_a_forming_pool_has_no_blocks_and_zero_ratios() -> None:
    row = cells(pools.COLUMNS, pool_info(num_blocks=0, free_blocks=0, cached_blocks=0))
    assert row[3:6] == ["0", "0.0%", "0.0%"]


def test_a_message_is_printed_as_protobufs_json_with_the_names_of_the_proto(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"pools": [pool_info(evicted_blocks=2**63)]})
    (pool,) = json.loads(capsys.readouterr().out)["pools"]
    assert (pool["state"], pool["free_blocks"], pool["evicted_blocks"]) == ("POOL_STATE_READY", 60, str(2**63))
    assert (pool["preemptions"], pool["ranks"]) == ("0", [])


def test_a_block_without_contents_has_neither_hash_nor_session() -> None:
    block = BlockInfo(block_id=3, state=BlockState.BLOCK_STATE_FREE)
    assert cells(blocks.COLUMNS, block) == ["3", "empty", "0", "-", "-", "-", ""]
