"""A rank that lends its memory, in this process, with a real server; and its socket."""

import asyncio
import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvpool.core.errors import ExhaustedError, InvalidArgumentError
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.core.specs.pool_config import KVCacheGroup
from kvpool.gpu_worker.lent_rank import LentRank
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.lending import memory_folder
from kvpool.lending.borrower_registry import Link
from kvpool.lending.lending_server import listening
from kvpool.lending.memory_file import close_all
from kvpool.lending.memory_folder import MemoryFolder
from support.lending import BLOCK_BYTES, CONFIG, DECLARED, LAYER, NUM_BLOCKS, declared_with
from support.server import running_server, server_process


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_server() as address:
        yield address


@pytest.fixture
def folder() -> Iterator[MemoryFolder]:
    with TemporaryDirectory() as root, MemoryFolder("m", 0, Path(root)) as folder:
        yield folder


def settings(server: str, num_blocks: int = NUM_BLOCKS, host_bytes: int = 0) -> WorkerSettings:
    return WorkerSettings(
        server,
        "m",
        0,
        1,
        RankGroupOptions(max_model_len=1),
        device="cpu",
        memory_bytes=num_blocks * BLOCK_BYTES,
        host_memory_bytes=host_bytes,
    )


def lent(
    server: str, folder: MemoryFolder, use: Callable[[LentRank], Coroutine[Any, Any, None]], host_bytes: int = 0
) -> None:
    """Runs a rank for as long as it is used."""

    async def run() -> None:
        rank = LentRank(settings(server, host_bytes=host_bytes), folder)
        try:
            await use(rank)
        finally:
            await rank.stop(keeps_memory=False)

    asyncio.run(run())


def sizes(folder: MemoryFolder, name: str = "memory") -> list[int]:
    return [path.stat().st_size for path in folder.path.glob(f"{name}-*")]


def test_a_rank_that_cannot_write_fails_and_the_next_engine_starts_it_again(
    server: str, folder: MemoryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(rank: LentRank) -> None:
        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr(folder, "write_rank", fail)
            with pytest.raises(ExhaustedError, match="No space left on device") as caught:
                await rank.ready_memory(DECLARED)
        assert caught.value.field == "declared.size_bytes"
        assert (rank.offer.is_lent, sizes(folder)) == (False, [])
        memory = await rank.ready_memory(declared_with(16))
        assert (memory.num_blocks, sizes(folder)) == (16, [16 * BLOCK_BYTES])

    lent(server, folder, use)


def test_a_refused_declaration_frees_no_memory(server: str, folder: MemoryFolder) -> None:
    async def use(rank: LentRank) -> None:
        before = await rank.ready_memory(DECLARED)
        with pytest.raises(InvalidArgumentError) as caught:
            await rank.ready_memory(declared_with(2 * NUM_BLOCKS))
        assert caught.value.field == "declared.size_bytes"
        assert await rank.ready_memory(DECLARED) == before
        assert [path.name for path in folder.path.glob("memory-*")] == ["memory-1"]

    lent(server, folder, use)


def test_memory_is_replaced_although_the_engine_that_asked_for_it_has_gone(server: str, folder: MemoryFolder) -> None:
    async def use(rank: LentRank) -> None:
        first = await rank.ready_memory(DECLARED)
        gone = asyncio.create_task(rank.ready_memory(declared_with(16)))
        await asyncio.sleep(0)  # it has begun
        gone.cancel()
        second = await rank.ready_memory(declared_with(8))
        assert second.epoch > first.epoch
        assert (second.num_blocks, sizes(folder)) == (8, [8 * BLOCK_BYTES])
        (descriptor,), _ = second.duplicate()
        assert os.fstat(descriptor).st_size == 8 * BLOCK_BYTES
        os.close(descriptor)

    lent(server, folder, use)


def test_a_rank_whose_folder_somebody_deletes_lends_its_memory_and_allocates_other_memory(
    server: str, folder: MemoryFolder
) -> None:
    async def use(rank: LentRank) -> None:
        memory = await rank.ready_memory(DECLARED)
        shutil.rmtree(folder.path.parents[1])
        link = Link(lambda _: None)
        process = rank.borrowers.connect(1, 1, "id", "engine", link)
        rank.borrowers.map(process, link, memory.epoch, lambda: None)
        rank.borrowers.bind(process, link, TableLease(memory.epoch, SessionNumber(1)))
        assert [each.client_id for each in folder.read_borrowers()] == ["id"]
        rank.borrowers.unmap(process, link)
        rank.borrowers.disconnect(process, link)
        shutil.rmtree(folder.path.parents[1])
        assert (await rank.ready_memory(declared_with(16))).epoch > memory.epoch
        assert sizes(folder) == [16 * BLOCK_BYTES]

    lent(server, folder, use)


def test_an_epoch_is_never_repeated_by_a_server_that_forgot_it(folder: MemoryFolder) -> None:
    with TemporaryDirectory() as path:
        address = f"unix:{path}/server"
        servers = [server_process(address) for _ in range(2)]

        async def use(rank: LentRank) -> None:
            with servers[0]:
                first = await rank.ready_memory(DECLARED)
            with servers[1]:
                second = await rank.ready_memory(declared_with(16))
                assert second.epoch > first.epoch

        lent(address, folder, use)


def test_a_process_that_waits_for_its_memory_is_no_obstacle_to_a_new_epoch(server: str, folder: MemoryFolder) -> None:
    """The pool waits for the process to answer a fence, and the process for the pool."""

    async def use(rank: LentRank) -> None:
        memory = await rank.ready_memory(DECLARED)
        sent = asyncio.Queue[int]()
        link = Link(lambda fence: sent.put_nowait(fence.epoch))
        process = rank.borrowers.connect(1, 1, "id", "engine", link)
        rank.borrowers.map(process, link, memory.epoch, lambda: None)
        rank.borrowers.bind(process, link, TableLease(memory.epoch, SessionNumber(1)))
        rank.borrowers.disconnect(process, link)
        rank.borrowers.end()  # as when a plan arrives
        again = Link(link.send)
        rank.borrowers.connect(1, 1, "id", "engine", again)
        rank.borrowers.resend_fence(process, again)
        assert await sent.get() == 0
        rank.borrowers.fence_answered(process, again, 1)
        assert rank.borrowers.is_drained

    lent(server, folder, use)


HOST_BYTES = 5 * BLOCK_BYTES + BLOCK_BYTES // 2


def test_as_many_blocks_as_fit_are_in_host_memory(server: str, folder: MemoryFolder) -> None:
    async def use(rank: LentRank) -> None:
        assert (rank.offer.host_bytes, rank.usage.host_bytes) == (HOST_BYTES, 0)
        memory = await rank.ready_memory(DECLARED)
        assert (memory.num_blocks, memory.num_host_blocks) == (NUM_BLOCKS, 5)
        assert (sizes(folder, "host"), rank.usage.host_bytes) == ([5 * BLOCK_BYTES], 5 * BLOCK_BYTES)
        descriptors, _ = memory.duplicate()
        assert [os.fstat(number).st_size for number in descriptors] == [DECLARED.size_bytes, 5 * BLOCK_BYTES]
        close_all(descriptors)
        config = replace(CONFIG, enable_caching=False)
        memory = await rank.ready_memory(replace(DECLARED, config=config))
        assert (memory.num_host_blocks, sizes(folder), sizes(folder, "host")) == (0, [DECLARED.size_bytes], [])

    lent(server, folder, use, HOST_BYTES)
    assert sizes(folder, "host") == []


def test_host_memory_that_holds_no_block_is_refused_and_nothing_changes(server: str, folder: MemoryFolder) -> None:
    wide = replace(LAYER, head_size=64)
    config = replace(CONFIG, num_blocks=4, groups=(KVCacheGroup(wide, ("layer.0",)),))
    other = replace(DECLARED, config=config, size_bytes=4 * wide.page_size_bytes)
    message = f"{HOST_BYTES} bytes hold no block of this engine, which takes {wide.page_size_bytes}"

    async def use(rank: LentRank) -> None:
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            await rank.ready_memory(other)
        assert (caught.value.field, rank.offer.is_lent) == ("host_memory", False)
        before = await rank.ready_memory(DECLARED)
        with pytest.raises(InvalidArgumentError, match=message):
            await rank.ready_memory(other)
        assert (await rank.ready_memory(DECLARED), rank.usage.host_bytes) == (before, 5 * BLOCK_BYTES)

    lent(server, folder, use, HOST_BYTES)


def test_host_memory_that_does_not_fit_its_file_system_is_refused_until_it_does(
    server: str, folder: MemoryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(rank: LentRank) -> None:
        with monkeypatch.context() as full:
            full.setattr(memory_folder, "free_bytes", lambda _: DECLARED.size_bytes)
            with pytest.raises(ExhaustedError, match=f"bytes do not fit {folder.path}: its file system has") as caught:
                await rank.ready_memory(DECLARED)
        assert (caught.value.reason, caught.value.field) == ("OUT_OF_MEMORY", "host_memory")
        assert (rank.offer.is_lent, sizes(folder), sizes(folder, "host")) == (False, [], [])
        assert (await rank.ready_memory(DECLARED)).num_host_blocks == 5

    lent(server, folder, use, HOST_BYTES)


@pytest.mark.parametrize("host_bytes", [0, HOST_BYTES - BLOCK_BYTES])
def test_memory_of_a_start_with_other_host_memory_is_dropped(
    server: str, folder: MemoryFolder, host_bytes: int
) -> None:
    kept(server, folder, HOST_BYTES)
    again = LentRank(settings(server, host_bytes=host_bytes), folder)
    assert (again.offer.is_lent, sizes(folder), sizes(folder, "host")) == (False, [], [])


def test_host_memory_is_kept_and_found_with_the_memory(server: str, folder: MemoryFolder) -> None:
    kept(server, folder, HOST_BYTES)

    async def use(rank: LentRank) -> None:
        assert rank.offer.is_lent
        assert ((await rank.ready_memory(DECLARED)).num_host_blocks, sizes(folder, "host")) == (5, [5 * BLOCK_BYTES])

    lent(server, folder, use, HOST_BYTES)


def kept(server: str, folder: MemoryFolder, host_bytes: int = 0) -> None:
    """Memory of an earlier process."""

    async def keep() -> None:
        rank = LentRank(settings(server, host_bytes=host_bytes), folder)
        await rank.ready_memory(DECLARED)
        await rank.stop(keeps_memory=True)

    asyncio.run(keep())
    assert sizes(folder)


def test_memory_that_a_later_start_may_not_lend_is_dropped(server: str, folder: MemoryFolder) -> None:
    kept(server, folder)
    rank = LentRank(settings(server, NUM_BLOCKS // 2), folder)
    assert (rank.offer.is_lent, sizes(folder)) == (False, [])


def test_memory_whose_file_was_replaced_is_dropped(server: str, folder: MemoryFolder) -> None:
    kept(server, folder)
    (file,) = folder.path.glob("memory-*")
    Path(shutil.copy2(file, folder.path / "copy")).rename(file)
    rank = LentRank(settings(server), folder)
    assert (rank.offer.is_lent, sizes(folder)) == (False, [])


# The socket.


@contextlib.contextmanager
def bound(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        yield other


def test_the_socket_replaces_one_without_a_listener(folder: MemoryFolder) -> None:
    path = folder.path / "socket"
    with bound(path):
        pass
    with listening(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_the_socket_of_a_later_lender_is_not_removed(folder: MemoryFolder) -> None:
    path = folder.path / "socket"
    with contextlib.ExitStack() as later:
        with listening(path):
            path.unlink()
            later.enter_context(listening(path))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


def test_the_socket_replaces_nothing_else(folder: MemoryFolder) -> None:
    path = folder.path / "socket"
    with bound(path) as other:
        other.listen()
        with pytest.raises(InvalidArgumentError, match="another server listens on") as caught, listening(path):
            pass
        assert caught.value.field == "lend"
        assert path.is_socket()
    path.unlink()
    path.write_text("a file")
    with pytest.raises(InvalidArgumentError, match="exists, and is not a socket"), listening(path):
        pass
    assert path.read_text() == "a file"
    with pytest.raises(InvalidArgumentError, match="is too long for a socket"), listening(folder.path / ("x" * 100)):
        pass
    with (
        pytest.raises(InvalidArgumentError, match=r"cannot listen on .*: Not a directory"),
        listening(path / "no" / "s"),
    ):
        pass
