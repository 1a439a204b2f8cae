"""A worker against a server that does what the test says, over a real socket."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.core.errors import (
    AbortedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import WorkerStatus
from kvpool.gpu_worker.tensors import empty_buffer, reshape_kv_cache
from kvpool.gpu_worker.worker import RankPool, Worker, WorkerHooks
from kvpool.v1 import worker_pb2
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import DeadlineError, ServerError
from kvpool.wire.protocol_version import PROTOCOL_VERSION
from support.rank_server import (
    BLOCK_BYTES,
    LAYERS,
    RankServer,
    RankStream,
    degraded,
    fence,
    plan_config,
    planned,
    ready,
    registered,
)
from support.socket_server import SocketServer
from support.torch import on_each_device
from support.waiting import DEADLINE_SECONDS, wait_until

SESSION = SessionNumber(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def server(path: Path) -> Iterator[RankServer]:
    with RankServer(path) as server:
        yield server


def settings(path: Path, device: str = "cpu") -> WorkerSettings:
    return WorkerSettings(
        f"unix:{path}", "m", 0, 2, RankGroupOptions(1024), device=device, memory_bytes=100 * BLOCK_BYTES
    )


class Runner:
    """A model runner: it binds the tensors that it gets, and drops them on release."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pools: queue.SimpleQueue[RankPool] = queue.SimpleQueue()

    @property
    def hooks(self) -> WorkerHooks:
        return WorkerHooks(self._on_epoch, self._on_release)

    def _on_epoch(self, pool: RankPool) -> None:
        self.calls.append(f"epoch {pool.epoch}")
        self.pools.put(pool)

    def _on_release(self) -> None:
        self.calls.append("release")
        while not self.pools.empty():
            self.pools.get()


class Buffers:
    """Allocates buffers, up to a limit in bytes, and knows which of them are alive."""

    def __init__(self, limit_bytes: int = 2**40) -> None:
        self.limit_bytes = limit_bytes
        self.most_bytes = 0
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        if self.live_bytes + size_bytes > self.limit_bytes:
            raise torch.cuda.OutOfMemoryError("as the test wants")
        buffer = empty_buffer(size_bytes, device)
        self._made.append(weakref.ref(buffer))
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        return buffer

    @property
    def live_bytes(self) -> int:
        return sum(buffer.numel() for made in self._made if (buffer := made()) is not None)


def joined(server: RankServer) -> RankStream:
    stream = server.next_stream()
    stream.register()
    return stream


def opened(server: RankServer, worker: Worker, epoch: int = 1, num_blocks: int = 10) -> RankStream:
    stream = joined(server)
    stream.open(epoch, num_blocks)
    assert worker.wait_ready(DEADLINE_SECONDS).epoch == epoch
    return stream


def refuses(worker: Worker, lease: TableLease) -> bool:
    """Whether a step would be kept out now."""
    try:
        worker.step(lease).done()
    except AbortedError:
        return True
    return False


@on_each_device
def test_a_rank_holds_the_planned_blocks_and_shows_the_common_number(
    server: RankServer, path: Path, device: torch.device
) -> None:
    runner = Runner()
    with Worker(settings(path, str(device)), LAYERS, hooks=runner.hooks) as worker:
        stream = server.next_stream()
        said = stream.register()
        assert (said.protocol_version, said.pool_name, said.rank, said.world_size) == (PROTOCOL_VERSION, "m", 0, 2)
        assert [layer.layer_name for layer in said.layers] == list(LAYERS)
        assert (said.available_bytes, said.HasField("held")) == (100 * BLOCK_BYTES, False)
        assert 8 <= len(said.boot_id) <= 64
        assert said.device.startswith(str(device))
        with pytest.raises(AbortedError, match="a step of epoch 1: the rank is"):
            worker.step(TableLease(1, SESSION)).done()
        stream.say(planned(1, 10))
        initialized = stream.initialized()
        assert (initialized.epoch, initialized.num_blocks, initialized.allocated_bytes) == (1, 10, 10 * BLOCK_BYTES)
        assert {shape.layer_name: shape.dtype for shape in initialized.shapes} == dict.fromkeys(LAYERS, "float32")
        stream.say(ready(1, 8))
        pool = worker.wait_ready(DEADLINE_SECONDS)
        assert (pool.epoch, pool.num_blocks, pool.max_model_len) == (1, 8, 1024)
        assert pool.config == plan_config(8)
        assert worker.usage.allocated_bytes == 10 * BLOCK_BYTES
        caches = [tensor for tensor in pool.kv_caches.values() if isinstance(tensor, torch.Tensor)]
        assert {tuple(cache.shape) for cache in caches} == {(2, 8, 16, 2, 8)}
        assert {cache.device for cache in caches} == {device}
        assert sorted(worker.kv_caches) == list(LAYERS)
        worker.step(TableLease(1, SESSION)).done()
        with pytest.raises(AbortedError, match="2 is not the current epoch, 1"):
            worker.step(TableLease(2, SESSION)).done()
        assert (worker.status.epoch, worker.status.num_blocks) == (1, 8)
        assert runner.calls == ["epoch 1"]
    assert stream.next().WhichOneof("message") == "leave"
    assert runner.calls == ["epoch 1", "release"]
    assert not worker.kv_caches
    with pytest.raises(AbortedError):
        worker.step(TableLease(1, SESSION)).done()
    with pytest.raises(AbortedError, match="has left the pool"):
        worker.wait_ready()


def test_status_changes_are_reported_and_usage_can_be_read(server: RankServer, path: Path) -> None:
    statuses: list[WorkerStatus] = []
    with Worker(settings(path), LAYERS, hooks=WorkerHooks(on_status=statuses.append)) as worker:
        before = time.time()
        assert (worker.usage.available_bytes, worker.usage.allocated_bytes) == (100 * BLOCK_BYTES, 0)
        stream = opened(server, worker)
        wait_until(lambda: bool(statuses) and statuses[-1].epoch == 1)
        stream.say(degraded(1, 1))
        wait_until(lambda: statuses[-1].absent_ranks == (1,))
        wait_until(lambda: worker.usage.heartbeats >= 3)
        usage = worker.usage
        assert (usage.allocated_bytes, usage.joins) == (10 * BLOCK_BYTES, 1)
        assert usage.last_heartbeat_seconds
        assert before <= usage.last_heartbeat_seconds <= time.time()
        stream.end()
        wait_until(lambda: statuses[-1].phase.value != "ready")
        server.next_stream().register()
        wait_until(lambda: worker.usage.joins == 2)
    assert statuses[0].phase.value == "joining"
    assert (statuses[-1].phase.value, statuses[-1].epoch, statuses[-1].is_serving) == ("left", 0, False)
    assert all(one != other for one, other in pairwise(statuses)), "only changes are reported"
    assert {status.phase.value for status in statuses} >= {"registered", "ready"}
    assert worker.usage.allocated_bytes == 0


def test_heartbeats_continue_during_allocation(server: RankServer, path: Path) -> None:
    may_go_on = threading.Event()

    def slow(size_bytes: int, device: torch.device) -> torch.Tensor:
        assert may_go_on.wait(DEADLINE_SECONDS)
        return empty_buffer(size_bytes, device)

    with Worker(settings(path), LAYERS, allocate=slow) as worker:
        stream = joined(server)
        stream.say(planned(1, 10))
        wait_until(lambda: worker.status.phase.value == "allocating")
        before = len(stream.heartbeats)
        wait_until(lambda: len(stream.heartbeats) >= before + 5)
        assert stream.is_silent()
        may_go_on.set()
        assert stream.initialized().num_blocks == 10
        assert stream.heartbeats == list(range(1, len(stream.heartbeats) + 1))


def test_heartbeats_continue_while_a_hook_runs(server: RankServer, path: Path) -> None:
    may_go_on = threading.Event()

    def slow(_: RankPool) -> None:
        assert may_go_on.wait(DEADLINE_SECONDS)

    with Worker(settings(path), LAYERS, hooks=WorkerHooks(on_epoch=slow)) as worker:
        stream = joined(server)
        stream.open(1, 10)
        before = len(stream.heartbeats)
        wait_until(lambda: len(stream.heartbeats) >= before + 5)
        with pytest.raises(AbortedError):
            worker.step(TableLease(1, SESSION)).done()
        may_go_on.set()
        worker.wait_ready(DEADLINE_SECONDS)
        worker.step(TableLease(1, SESSION)).done()


def test_a_broken_stream_loses_nothing(server: RankServer, path: Path) -> None:
    runner = Runner()
    with Worker(settings(path), LAYERS, hooks=runner.hooks) as worker:
        stream = server.next_stream()
        first = stream.register()
        stream.open(1, 10)
        before = worker.wait_ready(DEADLINE_SECONDS)
        stream.end(UnavailableError("DRAINING", "the server stops", retry_seconds=0.05))
        stream = server.next_stream()
        again = stream.register()
        assert again.boot_id == first.boot_id
        assert (again.held.epoch, again.held.num_blocks) == (1, 10)
        worker.step(TableLease(1, SESSION)).done()
        stream.say(ready(1, 10))
        wait_until(lambda: worker.status.phase.value == "ready")
        assert worker.wait_ready(DEADLINE_SECONDS) is before
        assert runner.calls == ["epoch 1"]


@pytest.mark.parametrize("num_blocks", [10, 6])
def test_a_new_plan_of_the_same_layout_keeps_the_tensors(server: RankServer, path: Path, num_blocks: int) -> None:
    runner, buffers = Runner(), Buffers()
    with Worker(settings(path), LAYERS, hooks=runner.hooks, allocate=buffers) as worker:
        stream = opened(server, worker)
        before = worker.kv_caches["l.0"]
        stream.say(degraded(2, 1))
        wait_until(lambda: worker.status.epoch == 0)
        with pytest.raises(AbortedError, match="absent ranks: 1"):
            worker.step(TableLease(1, SESSION)).done()
        initialized = stream.open(2, num_blocks)
        assert (initialized.epoch, initialized.num_blocks) == (2, 10)
        after = worker.wait_ready(DEADLINE_SECONDS)
        assert (after.epoch, after.num_blocks) == (2, num_blocks)
        view = after.kv_caches["l.0"]
        assert isinstance(before, torch.Tensor)
        assert isinstance(view, torch.Tensor)
        assert view.data_ptr() == before.data_ptr()
        assert view.shape[1] == num_blocks
        with pytest.raises(AbortedError):
            worker.step(TableLease(1, SESSION)).done()
        assert runner.calls == ["epoch 1", "epoch 2"]
        assert buffers.most_bytes == 10 * BLOCK_BYTES


def test_a_fence_is_answered_again_when_the_last_excluded_step_ends(server: RankServer, path: Path) -> None:
    with Worker(settings(path), LAYERS) as worker:
        stream = opened(server, worker)
        step, other = worker.step(TableLease(1, SESSION)), worker.step(TableLease(1, SessionNumber(2)))
        stream.say(fence(1, 1, 2, 2))
        stream.say(fence(2, 1, 2, 2))
        wait_until(lambda: refuses(worker, TableLease(1, SESSION)))
        answers = [stream.next().fenced for _ in range(2)]
        assert [(a.fence_sequence, list(a.pending_session_numbers)) for a in answers] == [
            (1, [SESSION]),
            (2, [SESSION]),
        ]
        assert worker.usage.steps_in_flight == 2
        threading.Thread(target=step.done).start()
        last = stream.next().fenced
        assert (last.fence_sequence, list(last.pending_session_numbers)) == (2, [])
        other.done()
        stream.say(fence(3, 1, 3))
        assert stream.next().fenced.fence_sequence == 3, "nothing is in flight: at once"


def test_a_new_plan_is_answered_when_the_steps_of_the_old_epoch_are_done(server: RankServer, path: Path) -> None:
    runner = Runner()
    with Worker(settings(path), LAYERS, hooks=runner.hooks) as worker:
        stream = opened(server, worker)
        with worker.step(TableLease(1, SESSION)):
            stream.say(planned(2, 20))
            wait_until(lambda: refuses(worker, TableLease(1, SESSION)))
            beats = len(stream.heartbeats)
            wait_until(lambda: len(stream.heartbeats) > beats + 1)
            assert (stream.is_silent(), runner.calls) == (True, ["epoch 1"])
        assert stream.initialized().epoch == 2
        assert runner.calls == ["epoch 1", "release"]


def test_another_plan_frees_the_tensors_before_it_allocates(server: RankServer, path: Path) -> None:
    runner, buffers = Runner(), Buffers(limit_bytes=20 * BLOCK_BYTES)
    with Worker(settings(path), LAYERS, hooks=runner.hooks, allocate=buffers) as worker:
        stream = opened(server, worker)
        assert stream.open(2, 20).num_blocks == 20
        assert worker.wait_ready(DEADLINE_SECONDS).num_blocks == 20
        assert runner.calls == ["epoch 1", "release", "epoch 2"]
        assert buffers.most_bytes == 20 * BLOCK_BYTES
    while not runner.pools.empty():
        runner.pools.get()
    assert buffers.live_bytes == 0


def test_a_silent_server_is_joined_again(server: RankServer, path: Path) -> None:
    with Worker(settings(path), LAYERS):
        stream = server.next_stream()
        stream.is_answering = False
        stream.next()
        stream.say(registered(heartbeat=0.05, timeout=1.5))
        assert server.next_stream().register().boot_id
        assert len(stream.heartbeats) >= 3


def test_a_worker_may_start_before_its_server(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvpool.worker"), Worker(settings(path), LAYERS) as worker:
        with pytest.raises(DeadlineError, match="rank 0 of 2 is not ready: the rank is"):
            worker.wait_ready(0.5)
        server = RankServer(path)
        opened(server, worker)
        wait_until(lambda: "server back" in caplog.messages)
    server.stop()
    assert caplog.messages.count("stream ended, joining again") == 1, "a trouble is said once, however often"


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("register.layers[0].spec", "not this"),
        WrongStateError("RANK_TAKEN", "another process is this rank", field="register.rank"),
        NotFoundError("NO_POOL", "no pool"),
    ],
    ids=lambda error: error.reason,
)
def test_errors_that_the_caller_must_resolve_are_raised(server: RankServer, path: Path, error: KvpoolError) -> None:
    with Worker(settings(path), LAYERS) as worker:
        server.next_stream().end(error)
        with pytest.raises(type(error), match=error.message) as raised:
            worker.wait_ready(DEADLINE_SECONDS)
        assert (raised.value.reason, raised.value.field) == (error.reason, error.field)
        with pytest.raises(AbortedError, match="the rank is failed"):
            worker.step(TableLease(1, SESSION)).done()


def test_a_server_of_an_older_release_is_reported(path: Path) -> None:
    with (
        SocketServer(path, lambda _: None),
        Worker(settings(path), LAYERS) as worker,
        pytest.raises(ServerError, match="Method not found") as raised,
    ):
        worker.wait_ready(DEADLINE_SECONDS)
    assert raised.value.reason == "UNIMPLEMENTED"


def test_a_device_with_less_memory_than_planned_gets_what_fits(
    server: RankServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffers = Buffers(limit_bytes=7 * BLOCK_BYTES)
    with caplog.at_level(logging.WARNING, "kvpool.worker"), Worker(settings(path), LAYERS, allocate=buffers) as worker:
        stream = joined(server)
        assert stream.open(1, 10).num_blocks == 7
        assert worker.wait_ready(DEADLINE_SECONDS).num_blocks == 7
        (record,) = [record for record in caplog.records if record.msg == "rank allocated less than planned"]
        assert (vars(record)["blocks"], vars(record)["planned_blocks"]) == (7, 10)
        stream.end()
        stream = server.next_stream()
        assert stream.register().held.num_blocks == 7


def broken_allocator(_: int, __: torch.device) -> torch.Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def broken_hook(_: RankPool) -> None:
    raise RuntimeError("the runner has a bug")


def test_a_failing_release_hook_does_not_keep_the_tensors(server: RankServer, path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("as the test wants")

    buffers = Buffers()
    with Worker(settings(path), LAYERS, hooks=WorkerHooks(on_release=broken), allocate=buffers) as worker:
        opened(server, worker)
        assert buffers.live_bytes == 10 * BLOCK_BYTES
    assert buffers.live_bytes == 0
    with pytest.raises(RuntimeError, match="as the test wants"):
        worker.wait_ready()


def torn_plan() -> worker_pb2.JoinResponse:
    config = plan_config(10)
    return planned(1, 10, replace(config, tensors=config.tensors[:1]))


def empty_plan() -> worker_pb2.JoinResponse:
    plan = planned(1, 10)
    plan.plan.num_blocks = 0
    return plan


def saying(plan: worker_pb2.JoinResponse) -> Callable[[RankStream], None]:
    return lambda stream: stream.say(plan)


PLAN = saying(planned(1, 10))
ENDS: dict[str, tuple[dict[str, Any], Callable[[RankStream], object], type[Exception], str]] = {
    "a bug of the runner": (
        {"hooks": WorkerHooks(on_epoch=broken_hook)},
        lambda stream: stream.open(1, 10),
        RuntimeError,
        "has a bug",
    ),
    "a broken device": ({"allocate": broken_allocator}, PLAN, RuntimeError, "illegal memory access"),
    "no memory for two blocks": (
        {"allocate": Buffers(limit_bytes=BLOCK_BYTES)},
        PLAN,
        ExhaustedError,
        r"2 blocks of .* do not fit cpu",
    ),
    "a torn plan": ({}, saying(torn_plan()), InvalidArgumentError, r"layer 'l\.\d' is in no buffer"),
    "an empty plan": ({}, saying(empty_plan()), InvalidArgumentError, r"plan\.num_blocks: 0"),
}
"""Options of the worker, what the server says, and the error that ends the rank."""


@pytest.mark.parametrize("end", ENDS)
def test_an_unexpected_error_ends_the_rank(server: RankServer, path: Path, end: str) -> None:
    options, say, error, message = ENDS[end]
    with Worker(settings(path), LAYERS, **options) as worker:
        stream = joined(server)
        say(stream)
        with pytest.raises(error, match=message):
            worker.wait_ready(DEADLINE_SECONDS)
        assert stream.next().WhichOneof("message") == "leave"


def test_closing_during_an_allocation_frees_its_result(server: RankServer, path: Path) -> None:
    called, may_go_on = threading.Event(), threading.Event()
    buffers = Buffers()

    def slow(size_bytes: int, device: torch.device) -> torch.Tensor:
        called.set()
        assert may_go_on.wait(DEADLINE_SECONDS)
        return buffers(size_bytes, device)

    worker = Worker(settings(path), LAYERS, allocate=slow)
    worker.start()
    stream = joined(server)
    stream.say(planned(1, 10))
    assert called.wait(DEADLINE_SECONDS)
    closing = threading.Thread(target=worker.close)
    closing.start()
    assert stream.next().WhichOneof("message") == "leave"
    may_go_on.set()
    closing.join(DEADLINE_SECONDS)
    assert not closing.is_alive()
    assert (buffers.most_bytes, buffers.live_bytes) == (10 * BLOCK_BYTES, 0)


def test_layouts_are_checked_before_joining(path: Path) -> None:
    for layouts, message in (
        ({"missing": "triton"}, "layer 'missing' is not a layer of the rank"),
        ({"l.0": "no such layout"}, r"'l\.0'"),
        ({"l.0": "mla"}, r"layout: 'mla' for layer 'l\.0': a FullAttentionSpec keeps no latent"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            Worker(settings(path), LAYERS, layouts=layouts)


def test_a_layout_shapes_its_layer(server: RankServer, path: Path) -> None:
    with Worker(settings(path), LAYERS, layouts={"l.1": "triton"}) as worker:
        opened(server, worker)
        views = {name: view for name, view in worker.kv_caches.items() if isinstance(view, torch.Tensor)}
        assert views["l.0"].shape == (2, 10, 16, 2, 8)
        assert views["l.1"].shape == (10, 2, 16, 2, 8)


def test_a_runner_may_see_the_pages_as_kernel_blocks(server: RankServer, path: Path) -> None:
    with Worker(settings(path), LAYERS) as worker:
        opened(server, worker)
        pool = worker.wait_ready()
        views = reshape_kv_cache(pool.config, pool.num_blocks, pool.buffers, kernel_block_sizes=[8, 8])
        for name, view in views.items():
            cache = pool.kv_caches[name]
            assert isinstance(view, torch.Tensor)
            assert isinstance(cache, torch.Tensor)
            assert view.shape == (2, 20, 8, 2, 8)
            view[0, 2] = 7.0  # the first half of block 1, keys before values in each
            assert cache[0, 1].flatten()[:128].eq(7.0).all()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"server": "nowhere"}, "server"),
        ({"pool": "a b"}, "pool"),
        ({"rank": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 4097}, "world_size"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"reserve_bytes": -1}, "reserve_bytes"),
        ({"options": RankGroupOptions(0)}, "max_model_len"),
    ],
)
def test_settings_refuse_what_is_out_of_range(path: Path, change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        replace(settings(path), **change)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_a_token_readable_by_others_is_refused_before_joining() -> None:
    with pytest.raises(InvalidArgumentError, match="others could read the token") as raised:
        WorkerSettings("host:1", "m", 0, 2, RankGroupOptions(1024), access=ClientCredentials(token=Path("token")))
    assert raised.value.field == "access"
