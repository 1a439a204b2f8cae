"""Data-parallel engines of a dense model, which vLLM runs as if each were alone: their pools, and their memory."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from signal import SIGTERM
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from engine.serving import site
from engine.vllm_serve import NUM_BLOCKS, REQUESTS, Serving, VllmServe, serving
from kvpool.client import PoolInfo, connect
from kvpool.client.vllm import Settings
from support.logging_process import LoggingProcess
from support.processes import KVPOOL
from support.waiting import wait_until

LENT = ("--worker-cls", "kvpool.client.vllm.Worker")


@pytest.mark.parametrize(
    ("size", "index", "memory", "pool", "lender"),
    [
        (1, 0, "", "p", ""),
        (1, 1, "", "p.dp1", ""),  # dense
        (2, 0, "", "p.dp0", ""),  # MoE
        (2, 1, "", "p.dp1", ""),
        (1, 0, "unix:/m-{dp}-{rank}", "p", "unix:/m-0-3"),
        (1, 1, "unix:/m-{dp}-{rank}", "p.dp1", "unix:/m-1-3"),
        (1, 0, "unix:/m-{rank}", "p", "unix:/m-3"),
        (1, 1, "unix:/m-{rank}", "p", "unix:/m-3"),
    ],
)
def test_replicas_have_a_pool_and_a_lender_each_unless_they_share_one(
    size: int, index: int, memory: str, pool: str, lender: str
) -> None:
    settings = Settings("unix:/s", "p", memory=memory)
    own = settings.of_replica(SimpleNamespace(data_parallel_size=size, data_parallel_index=index))
    assert (own.pool, own.memory_of(3)) == (pool, lender)


@pytest.fixture(scope="module")
def starts() -> Iterator[Serving]:
    with serving() as started:
        yield started


@pytest.fixture(scope="module")
def expected(starts: Serving) -> list[list[int]]:
    return starts.tokens_of_vllm_alone(REQUESTS)


def _start(starts: Serving, *options: str, **settings: str) -> VllmServe:
    """Starts one with two replicas, and waits until it serves."""
    started = starts.start("--data-parallel-size", "2", "--api-server-count", "1", *options, kvpool=settings)
    started.wait_ready()
    return started


def _stop(vllm: VllmServe, address: str, *pools: str) -> None:
    """Ends it by a signal, and waits for the ends of its sessions, whose lease is longer."""
    vllm.signal(SIGTERM)
    with connect(address) as client:
        for pool in pools:
            wait_until(lambda: not client.get_pool(pool).sessions, f"{pool} has a session")  # noqa: B023 - called here
            assert client.get_pool(pool).free_blocks == NUM_BLOCKS - 1
    vllm.process.end()


def _pools(address: str, *names: str) -> list[PoolInfo]:
    with connect(address) as client:
        return [client.get_pool(name) for name in names]


@pytest.mark.complete
@pytest.mark.timeout(1200)
def test_replicas_with_memory_of_their_own_have_a_pool_each(
    starts: Serving, address: str, expected: list[list[int]]
) -> None:
    vllm = _start(starts, address=address, pool="replicas")
    assert vllm.complete_all(REQUESTS) == expected
    pools = _pools(address, "replicas", "replicas.dp1")
    assert [pool.sessions for pool in pools] == [1, 1]
    assert all(pool.prefix_cache.queries_tokens for pool in pools), "both have computed"
    _stop(vllm, address, "replicas", "replicas.dp1")


@pytest.mark.complete
@pytest.mark.timeout(1200)
def test_replicas_on_the_memory_of_one_lender_share_a_pool(
    starts: Serving, address: str, expected: list[list[int]]
) -> None:
    with site(address, NUM_BLOCKS, "one-lender") as lent:
        vllm = _start(starts, *LENT, address=address, pool="one-lender", memory=lent.memory)
        assert vllm.complete_all(REQUESTS) == expected
        (pool,) = _pools(address, "one-lender")
        assert pool.sessions == 2
        assert pool.prefix_cache.shared_hits_tokens, "they hit each other's blocks"
        _stop(vllm, address, "one-lender")


@pytest.mark.complete
@pytest.mark.timeout(1200)
def test_replicas_with_a_lender_each_have_a_pool_each(starts: Serving, address: str, expected: list[list[int]]) -> None:
    names = ("two-lenders", "two-lenders.dp1")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        for index, name in enumerate(names):
            options = ("--rank", "0", "--device", "cpu", "--memory", "1GiB", "--lend", f"unix:{folder}/m{index}")
            lender = LoggingProcess(KVPOOL, "worker", "--server", address, "--pool", name, *options)
            stack.callback(lender.stop)
            lender.wait_for("lending")
        vllm = _start(starts, *LENT, address=address, pool=names[0], memory=f"unix:{folder}/m{{dp}}")
        assert vllm.complete_all(REQUESTS) == expected
        pools = _pools(address, *names)
        assert [pool.sessions for pool in pools] == [1, 1]
        assert [len(pool.ranks) for pool in pools] == [1, 1]
        assert all(pool.prefix_cache.queries_tokens for pool in pools), "both have computed"
        _stop(vllm, address, *names)
