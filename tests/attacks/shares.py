"""Attacks by a token that takes all that it may."""

from collections.abc import Callable
from functools import partial

from attacks.attack import Assault, refusal
from attacks.target import TENANTS, Target
from kvpool.core.errors import ExhaustedError, UnavailableError
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, directory_pb2, directory_pb2_grpc
from support.waiting import DEADLINE_SECONDS

_NAMES = 256
_PAUSE_SECONDS = 0.1


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


def place_pools(assault: Assault) -> None:
    """Has the cluster place 256 pools that are never created, again and again."""
    num_refused = 0
    with assault.target.channel("attacker") as channel:
        stub = directory_pb2_grpc.DirectoryServiceStub(channel)
        while not assault.is_over.is_set():
            for number in range(_NAMES):
                request = directory_pb2.PlaceRequest(pool_name=f"never-{number}")
                num_refused += _is_exhausted(partial(stub.Place, request, timeout=DEADLINE_SECONDS))
            assault.is_over.wait(_PAUSE_SECONDS)
    assert num_refused, "the token may place all names"


def _is_exhausted(call: Callable[[], object]) -> bool:
    error = refusal(call)
    assert error is None or isinstance(error, ExhaustedError | UnavailableError), error
    return isinstance(error, ExhaustedError)
