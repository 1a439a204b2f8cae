"""A WorkerService on a real socket that a test controls, and small plans for it to send."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import grpc

from kvpool.core.errors import KvpoolError
from kvpool.core.planning.plan import KVCacheConfig, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.ranks.messages import Planned
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.v1 import pool_pb2, worker_pb2, worker_pb2_grpc
from kvpool.wire import ranks as wire_ranks
from support.socket_server import SocketServer, abort
from support.waiting import DEADLINE_SECONDS

FULL: Final = FullAttentionSpec(16, 2, 8, "float32")
WINDOW: Final = SlidingWindowSpec(16, 2, 8, "float32", sliding_window=64)
LAYERS: Final = {"l.0": FULL, "l.1": WINDOW, "l.2": FULL, "l.3": WINDOW}
"""Two groups of two layers, i.e. two buffers with two layers each."""
BLOCK_BYTES: Final = 2 * FULL.page_size_bytes


def plan_config(num_blocks: int) -> KVCacheConfig:
    """The plan of a rank with these layers."""
    ranks = [RankMemory(LAYERS, num_blocks * BLOCK_BYTES)]
    config = get_kv_cache_configs(ranks, PlanOptions(16)).configs[0]
    assert config.num_blocks == num_blocks
    return config


def registered(heartbeat: float = 0.05, timeout: float = 5.0) -> worker_pb2.JoinResponse:
    timing = worker_pb2.Registered(heartbeat_seconds=heartbeat, heartbeat_timeout_seconds=timeout, grace_seconds=30.0)
    return worker_pb2.JoinResponse(registered=timing)


def planned(epoch: int, num_blocks: int, config: KVCacheConfig | None = None) -> worker_pb2.JoinResponse:
    return wire_ranks.server_message_to_proto(Planned(epoch, config or plan_config(num_blocks), 1024))


def ready(epoch: int, num_blocks: int) -> worker_pb2.JoinResponse:
    return worker_pb2.JoinResponse(ready=worker_pb2.Ready(epoch=epoch, num_blocks=num_blocks, max_model_len=1024))


def fence(sequence: int, epoch: int, last: int, *live: int) -> worker_pb2.JoinResponse:
    message = worker_pb2.Fence(
        fence_sequence=sequence, epoch=epoch, last_session_number=last, live_session_numbers=live
    )
    return worker_pb2.JoinResponse(fence=message)


def degraded(epoch: int, *absent_ranks: int) -> worker_pb2.JoinResponse:
    status = worker_pb2.PoolStatus(state=pool_pb2.POOL_STATE_DEGRADED, epoch=epoch, absent_ranks=absent_ranks)
    return worker_pb2.JoinResponse(status=status)


class RankStream:
    """The server's end of a rank's stream. While `is_answering`, heartbeats are answered with the last status."""

    def __init__(self) -> None:
        self.is_answering = True
        self.heartbeats: list[int] = []
        self._status = worker_pb2.PoolStatus(state=pool_pb2.POOL_STATE_FORMING)
        self._received: queue.SimpleQueue[worker_pb2.JoinRequest | None] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[worker_pb2.JoinResponse | KvpoolError | None] = queue.SimpleQueue()

    def say(self, *responses: worker_pb2.JoinResponse) -> None:
        for response in responses:
            if response.HasField("status"):
                self._status = response.status
            self._outgoing.put(response)

    def end(self, error: KvpoolError | None = None) -> None:
        self._outgoing.put(error)

    def next(self) -> worker_pb2.JoinRequest:
        """Waits for the rank's next message other than a heartbeat."""
        message = self._received.get(timeout=DEADLINE_SECONDS)
        assert message is not None, "the rank closed its side"
        return message

    def register(self) -> worker_pb2.Register:
        """Receives the registration and answers it."""
        message = self.next()
        assert message.WhichOneof("message") == "register"
        self.say(registered())
        return message.register

    def initialized(self) -> worker_pb2.Initialized:
        message = self.next()
        assert message.WhichOneof("message") == "initialized"
        return message.initialized

    def open(self, epoch: int, num_blocks: int) -> worker_pb2.Initialized:
        """Sends a plan, and Ready when the rank has allocated."""
        self.say(planned(epoch, num_blocks))
        initialized = self.initialized()
        self.say(ready(epoch, min(initialized.num_blocks, num_blocks)))
        return initialized

    def is_silent(self) -> bool:
        """Whether the rank has said nothing but heartbeats since."""
        return self._received.empty()

    def serve(
        self, requests: Iterator[worker_pb2.JoinRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.JoinResponse]:
        reader = threading.Thread(target=self._read, args=(requests,), daemon=True)
        reader.start()
        while (response := self._outgoing.get()) is not None:
            if isinstance(response, KvpoolError):
                abort(context, response)
            else:
                yield response

    def _read(self, requests: Iterator[worker_pb2.JoinRequest]) -> None:
        with contextlib.suppress(grpc.RpcError):
            for request in requests:
                if request.WhichOneof("message") == "heartbeat":
                    self.heartbeats.append(request.heartbeat.sequence)
                    if self.is_answering:
                        status = worker_pb2.PoolStatus()
                        status.CopyFrom(self._status)
                        status.heartbeat_sequence = request.heartbeat.sequence
                        self._outgoing.put(worker_pb2.JoinResponse(status=status))
                else:
                    self._received.put(request)
        self._received.put(None)
        self._outgoing.put(None)


class RankServer(SocketServer, worker_pb2_grpc.WorkerServiceServicer):
    """A server that ranks join."""

    def __init__(self, path: Path) -> None:
        self._streams: queue.SimpleQueue[RankStream] = queue.SimpleQueue()
        super().__init__(path, partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, self))

    def Join(  # noqa: N802 - the proto names it
        self, request_iterator: Iterator[worker_pb2.JoinRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.JoinResponse]:
        stream = RankStream()
        self._streams.put(stream)
        return stream.serve(request_iterator, context)

    def next_stream(self) -> RankStream:
        """Waits for a rank to join."""
        return self._streams.get(timeout=DEADLINE_SECONDS)
