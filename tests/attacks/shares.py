"""Attacks by a token that takes all that it may."""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from attacks.attack import Assault, refusal
from attacks.target import TENANTS, Target
from kvpool.client import Request
from kvpool.core.errors import ExhaustedError, UnavailableError
from kvpool.core.sessions.session import MAX_RESERVE_TOKENS
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc
from support.server import pool_config
from support.waiting import DEADLINE_SECONDS

_SCOPES = 500
_BLOCKS = 4_000
_PAUSE_SECONDS = 0.1
_MAX_BLOCKS, _MIN_BLOCKS = 16, 32
"""Quotas in a pool of 63 blocks, of which the tenant takes five."""
_PROMPT_TOKENS = 32


def open_sessions(assault: Assault) -> None:
    """Opens sessions of a shared pool until the server refuses more; and again, as leases end."""
    request = allocator_pb2.OpenSessionRequest(pool_name=TENANTS[0], lease_seconds=60)
    with assault.target.channel("attacker") as channel:
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        while not assault.is_over.is_set():
            if _is_exhausted(partial(stub.OpenSession, request, timeout=DEADLINE_SECONDS)):
                assault.is_over.wait(_PAUSE_SECONDS)


def open_session(target: Target) -> None:
    """Opens a session of the shared pool."""
    with target.connect(TENANTS[1], deadline_seconds=5) as client, client.open_session(TENANTS[0]):
        pass


def free_behind_steps(assault: Assault) -> None:
    """Frees blocks of a shared pool behind launched steps, which it never reports as executed."""
    with (
        assault.target.connect("attacker") as client,
        client.open_session(TENANTS[0], max_blocks=_MAX_BLOCKS) as session,
    ):
        while not assault.is_over.wait(_PAUSE_SECONDS / 10):
            number = session.sequence
            request = session.request(f"{number}", range(number, number + _PROMPT_TOKENS))
            session.admit(request)
            with session.step(launched_sequence=session.sequence) as step:
                step.free(request)
    assert session.sequence > _MAX_BLOCKS, "it has freed few blocks"


def hold_reserves(assault: Assault) -> None:
    """Runs short requests of a shared pool that hold as many slots in reserve as they get, and gives none back."""
    with (
        assault.target.connect("attacker") as client,
        client.open_session(TENANTS[0], max_blocks=_MAX_BLOCKS, reserve_tokens=MAX_RESERVE_TOKENS) as session,
    ):
        running: deque[Request] = deque()
        while not assault.is_over.wait(_PAUSE_SECONDS / 10):
            request = session.request(f"{session.sequence}", [session.sequence])
            if session.admit(request):
                running.append(request)
            elif running:
                session.free(running.popleft())
    assert session.sequence > _MAX_BLOCKS, "it has held few reserves"


def use_minimum(target: Target) -> None:
    """Opens a session of the shared pool with a minimum, and takes all of it."""
    with (
        target.connect(TENANTS[1], deadline_seconds=5) as client,
        client.open_session(TENANTS[0], min_blocks=_MIN_BLOCKS) as session,
    ):
        assert session.admit(session.request("all", range(1000, 1000 + _MIN_BLOCKS * 4)))


def open_scopes(assault: Assault) -> None:
    """Keeps many weights versions of a pool with events in use, and replaces its cached blocks again and again."""
    name, num_tokens = "attacker", 4 * _BLOCKS
    config = replace(pool_config(name, _BLOCKS + _SCOPES + 2, enable_events=True), max_model_len=num_tokens + 1)
    with assault.target.connect(name) as client, ExitStack() as opened:
        client.create_pool(config)
        for i in range(_SCOPES):
            session = opened.enter_context(client.open_session(name))
            session.set_weights_version(f"version {i}")
            assert session.admit(session.request("kept", range(4)))
        number = 0
        while not assault.is_over.is_set():
            number += 1
            request = session.request(str(number), range(number, number + num_tokens))
            assert session.admit(request)
            session.free(request)


def _is_exhausted(call: Callable[[], object]) -> bool:
    error = refusal(call)
    assert error is None or isinstance(error, ExhaustedError | UnavailableError), error
    return isinstance(error, ExhaustedError)
