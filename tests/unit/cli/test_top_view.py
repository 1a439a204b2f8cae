"""Screens of `kvpool top`: their contents, and that they fit every terminal."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import cast

import pytest
from rich.cells import cell_len

from kvpool.cli import top_sample, top_view
from kvpool.cli.pools import cached_share, empty_share
from kvpool.cli.top_sample import Sample
from kvpool.cli.top_view import Screen
from kvpool.client import RankInfo, RankState
from kvpool.client.admin import AdminClient
from kvpool.v1.admin_pb2 import ListPoolsResponse, SessionInfo
from kvpool.v1.pool_pb2 import (
    POOL_STATE_DEGRADED,
    POOL_STATE_FORMING,
    RANK_STATE_ABSENT,
    RANK_STATE_LOST,
    RANK_STATE_READY,
    RANK_STATE_SILENT,
    ActivityCounters,
    HostMemoryInfo,
    MappingProcess,
    PoolConfig,
    PrefixCacheCounters,
)
from support.operator import pool_info, sample, session_info


def shown(screen: Screen, now: Sample, trouble: str = "") -> list[str]:
    return [line.plain for line in top_view.lines(screen, "host:1", now, trouble)]


def ranks(*states: RankState.ValueType) -> list[RankInfo]:
    return [
        RankInfo(
            rank=i, state=state, device="cuda:0", host=f"host-{i}", pid=100 + i, allocated_bytes=2**35, num_blocks=1000
        )
        for i, state in enumerate(states)
    ]


def many(num_pools: int, num_sessions: int, name: str = "pool") -> Sample:
    pools = [
        pool_info(f"{name}{i:03}", sessions=num_sessions, num_blocks=2**31 - 1, free_blocks=2**30)
        for i in range(num_pools)
    ]
    sessions = [
        session_info(session_number=i + 1, pool_name=f"{name}000", client_name="模型" * 40) for i in range(num_sessions)
    ]
    return sample(*pools, sessions=sessions)


def test_the_primary_of_a_shard_shows_its_term() -> None:
    title = shown(Screen(80), sample(shard="llama", term=7))[0]
    assert title == "kvpool 1.2.3 at host:1, up 1m40s, primary of llama in term 7"
    assert "primary" not in shown(Screen(80), sample())[0]


def test_a_pool_and_its_session_on_eighty_columns() -> None:
    before = sample(pool_info(), sessions=(session_info(sequence=900),), taken_seconds=98.0)
    busy = pool_info(
        activity=ActivityCounters(steps=2468, allocations=820, refusals=6),
        prefix_cache=PrefixCacheCounters(queries_tokens=1000, hits_tokens=410),
        evicted_blocks=24,
        preemptions=3,
    )
    now = sample(busy, sessions=(session_info(),), taken_seconds=100.0)
    assert shown(Screen(80), top_sample.since(before, now)) == [
        "kvpool 1.2.3 at host:1, up 1m40s",
        "1 pool, 1 session, 3 requests running, 2 waiting",
        "█ used  ▒ cached and free  · empty",
        "m                   ready    e1        ███████▒▒▒▒▒····· 40.0% used 30.0% cached",
        "  hit 37.3% now 41.0%  1.2k steps/s   410 alloc/s     3 refused/s    12 evict/s",
        "  100 blocks, 1 session, 3 running, 2 waiting, 1.5 preempted/s",
        "  NO. POOL CLIENT                         RUN  WAIT  BLOCKS STEP/S    AGE   IDLE",
        "    1 m    scheduler                        3     2      40     50  1m40s    now",
    ]


def test_a_pool_with_host_memory_has_a_fourth_line() -> None:
    config, hits = (
        PoolConfig(name="m", num_blocks=101, num_host_blocks=400),
        PrefixCacheCounters(hits_tokens=90, preempted_hits_tokens=10, host_hits_tokens=35),
    )
    hosts = [
        pool_info(config=config, prefix_cache=hits, host_memory=HostMemoryInfo(cached_blocks=120, **copied))
        for copied in ({}, {"copied_out_blocks": 2400, "copied_in_blocks": 6})
    ]
    now = top_sample.since(sample(hosts[0], taken_seconds=98.0), sample(hosts[1], taken_seconds=100.0))
    assert shown(Screen(80), now)[6:] == [
        "  host memory: 120 of 400 blocks cached, 35.0% of hits,  1.2k out/s     3 in/s"
    ]
    assert shown(Screen(80, 6), now)[-1].startswith("  100 blocks, 1 session")
    assert now.rates["m"]["copied_in"] == 3.0


def test_ascii_only_screens() -> None:
    now = sample(pool_info(), sessions=(session_info(client_name="Zoë 模"),))
    text = "\n".join(shown(Screen(80, ascii_only=True), now))
    assert text.isascii()
    assert "######+++++....." in text
    assert "Zo? ?" in text


@pytest.mark.parametrize(("pools", "sessions"), [*product((0, 1, 3, 40), (0, 1, 100))])
def test_the_screen_fits_every_terminal(pools: int, sessions: int) -> None:
    now = many(pools, sessions, name="a/very.long-name_" * 7)
    now = top_sample.since(replace(now, taken_seconds=now.taken_seconds - 1e-3), now)
    for width, height in product((20, 40, 79, 80, 132, 300), (1, 2, 5, 10, 24, 50)):
        lines = shown(Screen(width, height), now, trouble="no answer " * 50)
        assert len(lines) <= height, (width, height)
        assert max(map(cell_len, lines)) <= width, (width, height)


def test_many_pools_get_fewer_lines_each_and_left_out_rows_are_counted() -> None:
    one = shown(Screen(80, 24), many(5, 10))
    assert sum("hit" in line for line in one) == sum("blocks," in line for line in one) == 5
    two = shown(Screen(80, 24), many(8, 10))
    assert (sum("hit" in line for line in two), sum("blocks," in line for line in two)) == (8, 0)
    three = shown(Screen(80, 24), many(15, 10))
    assert (sum(" used " in line for line in three[3:]), sum("hit" in line for line in three)) == (15, 0)
    assert three[-1] == "and 6 more sessions"
    four = shown(Screen(80, 24), many(40, 10))
    assert "and 24 more pools" in four
    assert sum(line.startswith("  NO.") for line in four) == 1


def test_trouble_and_degraded_pools_come_first() -> None:
    pools = [pool_info(f"p{i:02}") for i in range(30)]
    pools[20] = pool_info("p20", state=POOL_STATE_DEGRADED, ranks=ranks(RANK_STATE_READY, RANK_STATE_LOST))
    lines = shown(Screen(80, 24), sample(*pools), trouble="no answer since 12 s: UNAVAILABLE: refused")
    assert lines[1].rstrip() == "no answer since 12 s: UNAVAILABLE: refused"
    assert lines[3].startswith("p20 ")
    assert "degraded" in lines[3]


def test_ranks_are_shown_if_not_ready_or_on_request() -> None:
    info = pool_info(
        ranks=ranks(
            RANK_STATE_READY,
            RANK_STATE_LOST,
            RANK_STATE_READY,
            RANK_STATE_SILENT,
        )
    )
    lines = shown(Screen(80), sample(info))
    assert [line.split(",")[0].strip() for line in lines if line.startswith("    ")] == ["rank 1 lost", "rank 3 silent"]
    assert "    rank 1 lost, host-1 cuda:0, process 101, 1,000 blocks, 32.0 GiB" in lines
    assert "ranks 2 ready 1 silent 1 lost" in lines[5]
    every = shown(Screen(80, all_ranks=True), sample(info))
    assert sum(line.startswith("    rank") for line in every) == 4


def test_a_forming_pool_and_a_server_without_pools() -> None:
    forming = pool_info(
        num_blocks=0,
        free_blocks=0,
        state=POOL_STATE_FORMING,
        ranks=(RankInfo(state=RANK_STATE_ABSENT),),
    )
    lines = shown(Screen(80), sample(forming))
    assert "forming" in lines[3]
    assert "0.0% used" in lines[3]
    assert "    rank 0 absent" in lines
    assert shown(Screen(80), sample())[3:] == ["no pools"]
    assert "draining: no new sessions" in shown(Screen(80), sample(draining=True))[1]


@pytest.mark.parametrize(
    ("usage", "cached", "bar"),
    [
        (0.0, 0.0, "··········"),
        (0.001, 0.0, "█·········"),
        (0.5, 0.0, "█████·····"),
        (0.5, 0.3, "█████▒▒▒··"),
        (0.3, 0.7, "███▒▒▒▒▒▒▒"),
        (1.0, 0.0, "██████████"),
    ],
)
def test_a_bar_shows_used_then_cached_then_empty(usage: float, cached: float, bar: str) -> None:
    assert top_view._bar(Screen(), usage, cached, 10).plain == bar
    assert top_view._bar(Screen(), usage, cached, 0).plain == ""


def test_used_cached_and_empty_blocks_are_disjoint() -> None:
    info = pool_info()
    assert (info.usage, cached_share(info), empty_share(info)) == pytest.approx((0.4, 0.3, 0.3))
    uncached = pool_info(cached_blocks=10)
    assert (uncached.usage, cached_share(uncached), empty_share(uncached)) == pytest.approx((0.4, 0.0, 0.6))
    forming = pool_info(num_blocks=0, free_blocks=0)
    assert (cached_share(forming), empty_share(forming)) == (0.0, 0.0)


def test_a_new_epoch_is_visible_in_its_number_and_its_age() -> None:
    class Client:
        """Answers with an overview after the other."""

        def __init__(self, *epochs: int) -> None:
            self._overviews = [sample(pool_info(epoch=epoch)).overview for epoch in epochs]

        def overview(self) -> ListPoolsResponse:
            return self._overviews.pop(0)

        def sessions(self) -> Iterator[SessionInfo]:
            return iter(())

    client = cast(AdminClient, Client(59_712_345, 59_712_345, 59_712_346, 59_712_346))
    before = None
    screens = []
    for _ in range(4):
        before = top_sample.take(client, before)
        screens.append(shown(Screen(80), replace(before, taken_seconds=before.taken_seconds + 65)))
    assert [" e59712345 " in lines[3] for lines in screens] == [True, True, False, False]
    assert [" e59712346 " in lines[3] for lines in screens] == [False, False, True, True]
    assert ["new epoch since 1m05s" in lines[5] for lines in screens] == [False, False, True, True]


def test_sessions_come_busiest_first() -> None:
    sessions = (
        session_info(session_number=1, running_requests=1, held_blocks=(10,)),
        session_info(session_number=2, running_requests=9, held_blocks=(10,)),
        session_info(session_number=3, running_requests=1, held_blocks=(10, 5)),
    )
    assert [info.session_number for info in top_sample.busiest(sessions)] == [2, 3, 1]


def test_unknown_rates_are_left_out() -> None:
    now = sample(pool_info(activity=ActivityCounters(steps=10)), sessions=(session_info(),))
    assert top_sample.since(None, now) == top_sample.since(now, now) == now
    restarted = sample(*now.overview.pools, sessions=now.sessions, taken_seconds=99.0, uptime_seconds=500.0)
    assert top_sample.since(restarted, now) == now
    another = sample(pool_info(activity=ActivityCounters(steps=11)), taken_seconds=99.0)
    found = top_sample.since(another, now)
    assert (found.interval_seconds, found.rates, found.session_steps) == (1.0, {}, {})
    assert "    - steps/s" in shown(Screen(80), found)[4]


def test_ranks_show_the_processes_that_map_their_memory() -> None:
    (lent,) = ranks(RANK_STATE_READY)
    for pid, name in ((7, "vllm@a\x1b"), (8, "vllm@b")):
        lent.mapping_processes.append(MappingProcess(pid=pid, client_name=name))
    lines = shown(Screen(200, all_ranks=True), sample(pool_info(ranks=[lent])))
    assert any(line.endswith("mapped by vllm@a? (7), vllm@b (8)") for line in lines), lines
