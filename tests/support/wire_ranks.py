"""A rank at the wire level: one Join stream, written and read message by message."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import grpc

from kvpool.core.errors import KvpoolError
from kvpool.core.ranks.messages import Registration
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from kvpool.wire.errors import from_rpc_error
from kvpool.wire.ranks import registration_to_proto
from support.ranks import BLOCK_BYTES, registration
from support.waiting import DEADLINE_SECONDS


class WireRank:
    """One stream of one rank.

    Attributes:
        messages: All messages of the server.
        error: The error that ended the stream, if it ended.
    """

    def __init__(self, address: str) -> None:
        self.messages: list[worker_pb2.JoinResponse] = []
        self.error: KvpoolError | None = None
        self._news = threading.Condition()
        self._outgoing: queue.SimpleQueue[worker_pb2.JoinRequest | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address)
        self._call: Any = worker_pb2_grpc.WorkerServiceStub(self._channel).Join(iter(self._outgoing.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def register(self, registration: Registration, pool: str = "m") -> "WireRank":
        """Sends a registration."""
        return self.say(register=registration_to_proto(pool, registration))

    def allocate(self, num_blocks: int | None = None) -> "WireRank":
        """Waits for a plan and answers it."""
        plan = self.wait_for("plan").plan
        got = plan.num_blocks if num_blocks is None else num_blocks
        initialized = worker_pb2.Initialized(epoch=plan.epoch, num_blocks=got, allocated_bytes=got * BLOCK_BYTES)
        return self.say(initialized=initialized)

    def beat(self, sequence: int = 1) -> "WireRank":
        """Sends a heartbeat."""
        return self.say(heartbeat=worker_pb2.Heartbeat(sequence=sequence))

    def say(self, **message: Any) -> "WireRank":
        """Sends a message."""
        self._outgoing.put(worker_pb2.JoinRequest(**message))
        return self

    def wait_for(
        self, kind: str, matching: Callable[[worker_pb2.JoinResponse], bool] = lambda _: True
    ) -> worker_pb2.JoinResponse:
        """Waits for a message of this kind, including earlier messages."""

        def find() -> worker_pb2.JoinResponse | None:
            return next((m for m in reversed(self.messages) if m.WhichOneof("message") == kind and matching(m)), None)

        with self._news:
            assert self._news.wait_for(lambda: find() or self.error, DEADLINE_SECONDS), (kind, self.messages)
            found = find()
            if found is None:
                assert self.error
                raise self.error
            return found

    def wait_ended(self) -> KvpoolError:
        """Waits until the stream ends, and returns the error."""
        with self._news:
            assert self._news.wait_for(lambda: self.error, DEADLINE_SECONDS), self.messages
            assert self.error
            return self.error

    def cut(self) -> None:
        """Breaks the stream."""
        self._call.cancel()
        self._channel.close()

    def _read(self) -> None:
        try:
            for message in self._call:
                with self._news:
                    self.messages.append(message)
                    self._news.notify_all()
            ended = KvpoolError("OK", "the stream ended")
        except grpc.RpcError as error:
            ended = from_rpc_error(error)
        with self._news:
            self.error = ended
            self._news.notify_all()


def form(address: str, world_size: int, num_fencing: int) -> list[WireRank]:
    """Forms a pool of ranks, of which the first `num_fencing` answer fences."""
    ranks = [WireRank(address) for _ in range(world_size)]
    for rank, stream in enumerate(ranks):
        stream.register(registration(rank, world_size, fences=rank < num_fencing))
    for stream in ranks:
        stream.allocate()
    for stream in ranks:
        stream.wait_for("ready")
    return ranks


def keep(rank: WireRank, fence: worker_pb2.Fence) -> None:
    """Answers a fence."""
    rank.say(fenced=worker_pb2.Fenced(fence_sequence=fence.fence_sequence))
