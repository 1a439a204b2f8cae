"""Data-parallel engines: their pools, and their memory. vLLM runs those of a dense model as if each were alone."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGTERM
from tempfile import TemporaryDirectory

import pytest

from engine.lending import lenders
from engine.models import MIXTRAL
from engine.service import service
from engine.serving import site
from engine.vllm_serve import LEASE_SECONDS, NUM_BLOCKS, REQUESTS, Serving, VllmServe, serving
from kvpool.client import PoolInfo, connect
from support.waiting import wait_until


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a service listens for these tests alone: engines with no other setting use pools named after the model."""
    lease = ("--default-lease-seconds", str(LEASE_SECONDS))
    with TemporaryDirectory() as folder, service(Path(folder), *lease) as started:
        yield started.address


@pytest.fixture(scope="module")
def expected(starts: Serving) -> list[list[int]]:
    return starts.tokens_of_vllm_alone(REQUESTS)


@pytest.fixture
def environment(address: str, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of `vllm serve`."""
    monkeypatch.setenv("KVPOOL_ADDRESS", address)
    return monkeypatch


def _start(starts: Serving, *options: str) -> VllmServe:
    """Starts one with two replicas, and waits until it serves."""
    return starts.start("--data-parallel-size", "2", *options)


def _check_log(vllm: VllmServe, address: str, uses: list[str]) -> None:
    """Checks what the engines log: `uses` is pool and memory of each."""
    for use in set(uses):
        line = f"engine uses kvpool {use} address={address} setting=KVPOOL_ADDRESS\n"
        assert vllm.process.log.count(line) == uses.count(use), vllm.process.log
    for index, use in enumerate(uses):
        vllm.process.wait_for(rf"EngineCore_DP{index} .* engine attached {use.split()[0]} ")
    assert vllm.process.log.count("engine uses kvpool") == len(uses)


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


@contextmanager
def _lenders(address: str, names: Sequence[str]) -> Iterator[str]:
    """Starts a lender for each pool; yields their address, with the index of the engine left out."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        for index, name in enumerate(names):
            stack.enter_context(lenders(address, name, f"unix:{folder}/m{index}"))
        yield f"unix:{folder}/m{{dp}}"


@pytest.mark.complete
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("environment")
def test_replicas_with_memory_of_their_own_have_a_pool_each(
    starts: Serving, address: str, expected: list[list[int]]
) -> None:
    vllm = _start(starts)  # with an API server each
    assert vllm.complete_all(REQUESTS) == expected
    pools = _pools(address, "tiny", "tiny.dp1")
    assert [pool.sessions for pool in pools] == [1, 1]
    assert all(pool.prefix_cache.queries_tokens for pool in pools), "both have computed"
    assert vllm.process.log.count("ApiServer_1") > 1
    _check_log(vllm, address, ["pool=tiny memory=own", "pool=tiny.dp1 memory=own"])
    _stop(vllm, address, "tiny", "tiny.dp1")


@pytest.mark.complete
@pytest.mark.timeout(1200)
def test_replicas_on_the_memory_of_one_lender_share_a_pool(
    starts: Serving, address: str, expected: list[list[int]], environment: pytest.MonkeyPatch
) -> None:
    with site(address, NUM_BLOCKS, "one-lender") as lent:
        environment.setenv("KVPOOL_POOL", "one-lender")
        environment.setenv("KVPOOL_MEMORY", lent.memory)
        vllm = _start(starts)
        assert vllm.complete_all(REQUESTS) == expected
        (pool,) = _pools(address, "one-lender")
        assert pool.sessions == 2
        assert pool.prefix_cache.shared_hits_tokens, "they hit each other's blocks"
        _check_log(vllm, address, 2 * [f"pool=one-lender memory={lent.memory}"])
        _stop(vllm, address, "one-lender")


@pytest.mark.complete
@pytest.mark.timeout(1200)
def test_replicas_with_a_lender_each_have_a_pool_each(
    starts: Serving, address: str, expected: list[list[int]], environment: pytest.MonkeyPatch
) -> None:
    names = ("two-lenders", "two-lenders.dp1")
    with _lenders(address, names) as memory:
        environment.setenv("KVPOOL_POOL", names[0])
        environment.setenv("KVPOOL_MEMORY", memory)
        _check_engines_of_their_own(_start(starts, "--api-server-count", "1"), address, names, memory, expected)


def _check_engines_of_their_own(
    vllm: VllmServe, address: str, names: Sequence[str], memory: str, expected: list[list[int]]
) -> None:
    assert vllm.complete_all(REQUESTS) == expected
    pools = _pools(address, *names)
    assert [pool.sessions for pool in pools] == [1, 1]
    assert [len(pool.ranks) for pool in pools] == [1, 1]
    assert all(pool.prefix_cache.queries_tokens for pool in pools), "both have computed"
    uses = [f"pool={name} memory={memory.replace('{dp}', str(index))}" for index, name in enumerate(names)]
    _check_log(vllm, address, uses)
    _stop(vllm, address, *names)


@pytest.mark.complete
@pytest.mark.timeout(1200)
def test_engines_of_an_moe_model_compute_together_with_a_lender_each(
    address: str, environment: pytest.MonkeyPatch
) -> None:
    names = ("experts.dp0", "experts.dp1")
    options = ("--worker-extension-cls", "engine.expert_worker.Extension", "--api-server-count", "1")
    with serving(MIXTRAL) as starts, _lenders(address, names) as memory:
        environment.delenv("KVPOOL_ADDRESS")
        expected = starts.tokens_of_vllm_alone(REQUESTS, "--data-parallel-size", "2", *options)
        environment.setenv("KVPOOL_ADDRESS", address)
        environment.setenv("KVPOOL_POOL", "experts")
        environment.setenv("KVPOOL_MEMORY", memory)
        _check_engines_of_their_own(_start(starts, *options), address, names, memory, expected)
