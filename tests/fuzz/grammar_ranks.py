"""Generates the messages of ranks."""

from random import Random
from typing import Final

from fuzz.configs import DECLARED_POOL, RANK_POOLS
from fuzz.served import Served
from kvpool.core.ids import PoolName
from kvpool.v1 import worker_pb2
from kvpool.wire.ranks import registration_to_proto
from support.ranks import declared, declaring, registration

_WORLD_SIZES: Final = {"r0": 1, "r1": 2, "r2": 3, "r3": 2}


class RankGrammar:
    """Generates the messages of a stream: a registration, then the messages that the membership waits for."""

    def __init__(self, rng: Random, served: Served) -> None:
        self._rng = rng
        self._served = served

    def pool(self) -> str:
        """Any pool of ranks."""
        return self._rng.choice(RANK_POOLS)

    def write(self, pool: str, *, is_first: bool) -> worker_pb2.JoinRequest:
        """The next message of a stream."""
        rng = self._rng
        if is_first:
            size = _WORLD_SIZES[pool]
            rank = rng.randrange(size)
            boot_id, blocks = f"process-{rank}-{rng.choice('aaab')}", rng.choice((70, 70, 90, 9))
            if rng.random() < (0.95 if pool == DECLARED_POOL else 0.03):
                version = rng.choice("1111112")
                memory = declared(name=pool, blocks=blocks, fingerprint=(("revision", version),))
                said = declaring(rank, size, memory, boot_id=boot_id)
            else:
                said = registration(rank, size, boot_id=boot_id, blocks=blocks)
            message = worker_pb2.JoinRequest(register=registration_to_proto(pool, said))
            message.register.fences = rng.random() < 0.8
            if said.declared:
                message.register.num_host_blocks = rng.choice((7, 7, 7, 7, 7, 7, 9, 0, 2**31))
            return message
        membership = self._served.parts.pools.memberships.get(PoolName(pool))
        epoch = membership.epoch if membership else 1
        chance = rng.random()
        if chance < 0.4:
            blocks = rng.choice((70, 70, 80, 5))
            initialized = worker_pb2.Initialized(epoch=epoch, num_blocks=blocks, allocated_bytes=1024)
            return worker_pb2.JoinRequest(initialized=initialized)
        if chance < 0.6:
            return worker_pb2.JoinRequest(fenced=worker_pb2.Fenced(fence_sequence=rng.randrange(1, 6)))
        if chance < 0.7:
            numbers = [rng.randrange(1, 60) for _ in range(rng.choice((0, 1, 1, 3)))]
            return worker_pb2.JoinRequest(sessions_gone=worker_pb2.SessionsGone(session_numbers=numbers))
        if chance < 0.95:
            return worker_pb2.JoinRequest(heartbeat=worker_pb2.Heartbeat(sequence=rng.randrange(1, 9)))
        return worker_pb2.JoinRequest(leave=worker_pb2.Leave())
