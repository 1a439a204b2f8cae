"""Replacements for the machine during a schedule: time, randomness and grpc.aio."""

import os
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import grpc
from grpc_reflection.v1alpha import reflection

from kvpool.core.ranks import pool_plan
from kvpool.core.ranks.pool_plan import pool_config
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.server import app, shard_setup
from kvpool.server.cluster import replicator
from kvpool.server.cluster.directory import Directory
from kvpool.server.journal import folder
from kvpool.server.journal.folder import write_whole
from kvpool.server.services import admin_service, step_links
from kvpool.wire import backoff
from simulation.byte_streams import SimulatedAcceptor
from simulation.grpc_call import Wire
from simulation.grpc_channel import SimulatedChannel
from simulation.grpc_server import SimulatedServer
from simulation.step_link import ObservedLink
from simulation.virtual_loop import VirtualLoop

_EPOCH_SECONDS = 1_700_000_000.0


@contextmanager
def stand_ins(
    loop: VirtualLoop,
    drawn: random.Random,
    wire: Wire,
    directory: Callable[[], Directory],
    exit_process: Callable[[int], NoReturn],
) -> Iterator[None]:
    """Replaces time, secrets, grpc, etcd and the process's end for the time of a schedule."""
    before = random.getstate()
    random.seed(drawn.getrandbits(64))
    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "perf_counter", loop.time),
        (time, "thread_time", loop.time),
        (time, "clock_gettime", lambda _: loop.time()),
        (time, "monotonic_ns", lambda: int(loop.time() * 1e9)),
        (time, "time", lambda: _EPOCH_SECONDS + loop.now_seconds),
        (os, "_exit", exit_process),
        (secrets, "token_bytes", lambda count=32: drawn.randbytes(count)),
        (secrets, "token_hex", lambda count=32: drawn.randbytes(count).hex()),
        (secrets, "token_urlsafe", lambda count=32: drawn.randbytes(count).hex()),
        (backoff, "generator", random.Random(drawn.getrandbits(64))),  # noqa: S311 - others may draw in threads of their own
        (uuid, "uuid4", lambda: uuid.UUID(int=drawn.getrandbits(128))),
        (grpc.aio, "insecure_channel", lambda address, **_: SimulatedChannel(wire, address)),
        (grpc.aio, "server", lambda interceptors, **_: SimulatedServer(wire, interceptors)),
        (app, "max_connections", lambda *_: 1000),  # the originals of this and the next resolve the addresses
        (app, "ip_addresses", lambda address: [address]),
        (shard_setup, "EtcdDirectory", lambda _: directory()),
        (folder, "write_whole", write_whole),  # so that a replacement made during the schedule is undone
        (admin_service, "version", lambda _: "0"),  # the original reads a file per call
        (replicator, "Acceptor", SimulatedAcceptor),
        (step_links, "Acceptor", SimulatedAcceptor),
        (step_links, "StepLink", partial(ObservedLink, wire)),
        (reflection, "enable_server_reflection", lambda *_: None),
    ]
    patches = [mock.patch.object(target, name, value) for target, name, value in replaced]
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
        random.setstate(before)


def host_memory(num_host_blocks: int) -> AbstractContextManager[object]:
    """Gives pools a second tier of this size, 0 for none.

    Only ranks that declare their memory can have one, and the simulated ones let the server plan it.
    """

    def with_second_tier(*arguments: Any) -> PoolConfig:
        return replace(pool_config(*arguments), num_host_blocks=num_host_blocks)

    return mock.patch.object(pool_plan, "pool_config", with_second_tier)
