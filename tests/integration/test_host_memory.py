"""Host memory that a real lender lends beside its memory: real processes share it, and it outlives them."""

import urllib.request
from collections.abc import Iterator

import pytest

from kvpool.client import connect
from kvpool.core.errors import ExhaustedError, InvalidArgumentError
from kvpool.lending.lender_client import connect_lender
from support.lending import BLOCK_BYTES, DECLARED, EngineProcess, LenderProcess, engine, lender_process
from support.server import running_server
from support.small_file_system import small_file_system
from support.waiting import DEADLINE_SECONDS
from support.workers import ready

HOST = ("--host-memory", f"{4 * BLOCK_BYTES}B")


@pytest.fixture
def server() -> Iterator[str]:
    with running_server() as address:
        yield address


def fill(process: EngineProcess, *values: int) -> None:
    for row, value in enumerate(values):
        process("fill_host", row, value)


@pytest.mark.slow
def test_engines_share_host_memory_and_it_outlives_them(server: str) -> None:
    with lender_process(server, 0, 1, *HOST, "--metrics-listen", "127.0.0.1:0") as lender:
        with engine(server, lender.address) as first, engine(server, lender.address) as second:
            assert lender.wait_for("host memory allocated pool=m rank=0")
            with connect(server) as client:
                config = client.get_pool("m").config
                assert (config.num_blocks, config.num_host_blocks) == (DECLARED.config.num_blocks, 4)
            fill(first, 5, 6, 7)
            assert second("host") == [[5, 6, 7, 0]]
            fill(second, 8)
            assert first("host") == [[8, 6, 7, 0]]
            first("unmap")
            second("fill_host", 3, 9)
            first("map_again")
            assert first("host") == [[8, 6, 7, 9]]
            first.kill()
        with engine(server, lender.address) as third:
            assert third("host") == [[8, 6, 7, 9]]
        address = lender.wait_for("metrics listening").partition("address=")[2].strip()
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE_SECONDS) as page:
            assert f'kvpool_worker_host_bytes{{pool="m",rank="0"}} {4.0 * BLOCK_BYTES}' in page.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_host_memory_outlives_the_worker(server: str, *, is_killed: bool) -> None:
    with lender_process(server, 0, 1, *HOST, "--keep-memory") as lender, engine(server, lender.address) as first:
        fill(first, 1, 2, 3, 4)
        if is_killed:
            lender.kill()
        else:
            assert lender.stop() == 0
        lender.restart()
        lender.wait_for(ready(first.started["epoch"]))
        with engine(server, lender.address) as second:
            assert (second("host"), second.started["epoch"]) == ([[1, 2, 3, 4]], first.started["epoch"])
            fill(first, 5)
            assert second("host") == [[5, 2, 3, 4]], "the same memory"


@pytest.mark.slow
def test_ranks_with_different_host_memory_share_the_smallest_number_of_blocks(server: str) -> None:
    with (
        lender_process(server, 0, 2, *HOST) as zero,
        lender_process(server, 1, 2, "--host-memory", f"{2 * BLOCK_BYTES}B") as one,
        engine(server, zero.address, one.address) as first,
        engine(server, zero.address, one.address) as second,
    ):
        fill(first, 1, 2)
        assert second("host") == [[1, 2], [1, 2]]


@pytest.mark.slow
def test_a_rank_without_host_memory_leaves_the_pool_without(server: str) -> None:
    with (
        lender_process(server, 0, 2, *HOST) as zero,
        lender_process(server, 1, 2) as one,
        engine(server, zero.address, one.address) as process,
    ):
        assert process("host") == [None, None]
        with connect(server) as client:
            assert client.get_pool("m").config.num_host_blocks == 0


def test_host_memory_that_holds_no_block_of_an_engine_is_refused(server: str) -> None:
    with lender_process(server, 0, 1, "--host-memory", f"{BLOCK_BYTES - 1}B") as lender:
        client = connect_lender(lender.address, "m")
        assert client.offer.host_bytes == BLOCK_BYTES - 1
        with pytest.raises(InvalidArgumentError, match=f"host_memory: {BLOCK_BYTES - 1} bytes hold no block"):
            client.map(DECLARED, DEADLINE_SECONDS)
        client.close()
        assert not [*lender.folder.rglob("memory-*"), *lender.folder.rglob("host-*")]


def test_host_memory_that_its_file_system_has_no_room_for_is_refused(server: str) -> None:
    size_bytes = 64 * 1024
    with (
        small_file_system(size_bytes) as folder,
        LenderProcess(server, folder, 0, 1, "--host-memory", "1MiB") as lender,
    ):
        client = connect_lender(lender.address, "m")
        with pytest.raises(ExhaustedError, match=f"host_memory: {2**20} bytes do not fit {folder}.* bytes free"):
            client.map(DECLARED, DEADLINE_SECONDS)
        client.close()
        assert not [*folder.rglob("memory-*"), *folder.rglob("host-*")]
        assert lender.is_alive


def test_more_host_memory_than_the_machine_has_is_refused_at_the_start(
    server: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lender")
    lender = LenderProcess(server, folder, 0, 1, "--host-memory", "900TiB", waits=False)
    assert lender.end() == 1
    lender.wait_for("LARGER_THAN_THE_DEVICE: --host-memory: 921,600.0 GiB are more than this machine has left")
