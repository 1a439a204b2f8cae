"""Attacks on the memory of a server, and on the time that it needs for what it receives."""

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from attacks.attack import Assault, refusal
from attacks.target import Target
from kvpool.client import Client, DeadlineError
from kvpool.core.errors import ExhaustedError, InvalidArgumentError, NotFoundError
from kvpool.v1 import allocator_pb2, event_pb2, event_pb2_grpc, pool_pb2, step_pb2
from support.server import pool_config
from support.waiting import DEADLINE_SECONDS, wait_until

_GROWTH_BYTES: Final = 5 * 2**24
_PROMPT_TOKENS: Final = 2**12
_REFUSAL_SECONDS: Final = 120.0
"""Time limit of the first refusal for lack of memory."""
_MESSAGE_BYTES: Final = 2**24
_MESSAGES_GROWTH_BYTES: Final = 2**29
"""Growth of the server's address space: what it needs for one message, several times."""
_KEPT_BYTES: Final = 2**27
"""Growth of the server's memory that may remain after an attack."""
_RETURN_SECONDS: Final = 30.0
"""Time in which memory returns: streams that are not read end, and large objects are freed."""
_LARGE_BLOCKS: Final = 50_000
_WATCHES: Final = 256
_WATCHED_PROMPTS: Final = 32
_REFUSALS: Final = (InvalidArgumentError, NotFoundError, ExhaustedError)
_T = TypeVar("_T")


def exhaust_memory(assault: Assault) -> None:
    """Caches long prompts until the server, which may grow by 80 MiB, has no memory for more; closes, and again.

    On a busy machine, the first refusal may come after the end of the attack. The attack then continues until it comes.
    """
    num_refusals = 0
    due_seconds = time.monotonic() + _REFUSAL_SECONDS

    def is_over() -> bool:
        return assault.is_over.is_set() and (num_refusals > 0 or time.monotonic() >= due_seconds)

    _create_pool(assault.target, 2**20)
    # The client repeats a refused call until its deadline.
    with (
        assault.target.connect("attacker", deadline_seconds=2.0) as client,
        _limited_memory(assault.target, _GROWTH_BYTES),
    ):
        while not is_over():
            try:
                _cache_until(client, is_over)
            except DeadlineError:  # the server is too busy to answer; a new session continues
                pass
            except ExhaustedError as error:
                if error.reason != "OUT_OF_MEMORY":
                    raise
                num_refusals += 1
    assert num_refusals, "the server had memory for all"


def send_refused_messages(assault: Assault) -> None:
    """Sends messages of 16 MiB for a session that does not exist, between changes of a large pool.

    Every other one is compressed, to 16 KiB, which a server refuses. The token is one of other pools.
    """
    update = allocator_pb2.RequestUpdate(request_id="x" * (_MESSAGE_BYTES - 1000))
    message = allocator_pb2.AllocateSlotsRequest(session_id="no session", sequence=1, request=update)
    unary = "AllocateSlots", message.SerializeToString()
    with (
        _limited_memory(assault.target, _MESSAGES_GROWTH_BYTES),
        assault.target.connect("attacker") as client,
        assault.target.admin() as admin,
        bounded_memory(assault.target),
        assault.target.channel("stranger") as channel,
    ):
        for is_zipped in _until_over(assault, [True, False]):
            _send_refused(channel, *unary, is_zipped=is_zipped)
            client.create_pool(pool_config("large", _LARGE_BLOCKS))
            admin.remove_pool("large")


def send_empty_strings(assault: Assault) -> None:
    """Sends messages that consist of millions of empty strings: names of layers, and ids of requests in a step."""
    group = pool_pb2.KvCacheGroup(layer_names=[""] * (_MESSAGE_BYTES // 2 - 1000))
    config = pool_pb2.PoolConfig(name="stranger", num_blocks=10, max_model_len=1024, groups=[group])
    step = step_pb2.Step(session_id="no session", sequence=1, request_ids=[""] * (_MESSAGE_BYTES // 3 - 1000))
    messages = [
        ("CreatePool", allocator_pb2.CreatePoolRequest(config=config).SerializeToString()),
        ("Schedule", step.SerializeToString()),
    ]
    del group, config, step
    with bounded_memory(assault.target), assault.target.channel("stranger") as channel:
        for method, message in _until_over(assault, messages):
            _send_refused(channel, method, message, is_zipped=False)


def watch_without_reading(assault: Assault) -> None:
    """Opens 256 watches with snapshots of a large cache, and reads none. Opens those that end again."""
    _create_pool(assault.target, 2**16, enable_events=True)
    with assault.target.connect("attacker") as client, client.open_session("attacker") as session:
        for number in range(_WATCHED_PROMPTS):
            request = session.request(str(number), range(number, number + _PROMPT_TOKENS))
            assert session.admit(request)
            session.mark_executed()
            session.free(request)
    snapshot = event_pb2.WatchRequest(pool_name="attacker", snapshot=True)
    with bounded_memory(assault.target), assault.target.channel("watcher") as channel:
        stub = event_pb2_grpc.EventServiceStub(channel)
        watches: list[grpc.Call] = []
        while not assault.is_over.wait(0.1):
            watches = [watch for watch in watches if watch.is_active()]
            watches += [stub.Watch(snapshot) for _ in range(_WATCHES - len(watches))]


def _create_pool(target: Target, num_blocks: int, **options: object) -> None:
    """Creates the attacker's pool."""
    with target.connect("attacker") as client:
        client.create_pool(replace(pool_config("attacker", num_blocks, **options), max_model_len=_PROMPT_TOKENS))


def _cache_until(client: Client, is_over: Callable[[], bool]) -> None:
    """Caches one prompt after the other in a new session."""
    with client.open_session("attacker") as session:
        while not is_over():
            number = session.sequence
            assert session.admit(session.request(str(number), range(number, number + _PROMPT_TOKENS)))


def _until_over(assault: Assault, values: Iterable[_T]) -> Iterator[_T]:
    """Yields the values again and again during the attack."""
    for value in cycle(values):
        if assault.is_over.is_set():
            return
        yield value


def _send_refused(channel: grpc.Channel, method: str, message: bytes, *, is_zipped: bool) -> None:
    """Sends the first message of a call, and checks that it is refused."""
    start: Any = channel.stream_stream(f"/kvpool.v1.AllocatorService/{method}")
    compression = grpc.Compression.Gzip if is_zipped else grpc.Compression.NoCompression
    error = refusal(lambda: next(start(iter([message]), timeout=DEADLINE_SECONDS, compression=compression)))
    assert error, "the message was not refused"
    assert error.reason == "UNIMPLEMENTED" if is_zipped else isinstance(error, _REFUSALS), error


@contextlib.contextmanager
def _limited_memory(target: Target, growth_bytes: int) -> Iterator[None]:
    """The server's address space can grow by this many bytes during the block."""
    pid, (_, hard) = target.server.pid, resource.getrlimit(resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (_memory_bytes(target)[0] + growth_bytes, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))


@contextlib.contextmanager
def bounded_memory(target: Target) -> Iterator[None]:
    """Checks that the memory of the server has not grown much at the end of the block."""
    before = _memory_bytes(target)[1]
    yield
    what = f"the server keeps more than {_KEPT_BYTES} bytes: {before} before"
    wait_until(lambda: _memory_bytes(target)[1] <= before + _KEPT_BYTES, what, _RETURN_SECONDS)


def _memory_bytes(target: Target) -> tuple[int, int]:
    """Size of the server's address space, and of what is resident of it."""
    size, resident = Path(f"/proc/{target.server.pid}/statm").read_text().split()[:2]
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return int(size) * page_bytes, int(resident) * page_bytes
