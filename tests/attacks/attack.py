"""What an attack is, what it may cost, and what attacks have in common."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from attacks.target import Target
from kvpool.client import KvpoolError
from kvpool.wire.errors import from_rpc_error


@dataclass(frozen=True, slots=True)
class Assault:
    """One run of an attack.

    Attributes:
        target: The server.
        seconds: Duration of the run.
        is_over: Set at its end.
    """

    target: Target
    seconds: float
    is_over: threading.Event


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack, and what it may cost.

    Attributes:
        run: Attacks the server until `Assault.is_over` is set. It runs in the process of the test at the lowest
            priority, because a real attacker uses the processors of another machine.
        target: What is attacked.
        options: More options of the server.
        limit: What to put before the server's command, to limit its resources.
        meanwhile: What others do again and again, before and during the attack; an error is a violation.
        has_full_log: Whether no process reads the server's log.
        is_on_small_disk: Whether the journal is on a file system of its own of 4 MiB; needs root.
        costs_journal: Whether the journal may be given up during the attack. It must be up again afterwards.
        costs_time: Whether tenants may have to repeat refused steps, so that their time is not judged.
        afterwards: Called after the attack, when the tenants have ended; the server must be ready then.
    """

    run: Callable[[Assault], None]
    target: type[Target] = Target
    options: tuple[str, ...] = ()
    limit: tuple[str, ...] = ()
    meanwhile: Callable[[Target], None] | None = None
    has_full_log: bool = False
    is_on_small_disk: bool = False
    costs_journal: bool = False
    costs_time: bool = False
    afterwards: Callable[[Target], None] | None = None


def refusal(call: Callable[[], object]) -> KvpoolError | None:
    """Makes a call of gRPC. Returns the error with which it is refused; None if it is not."""
    try:
        call()
    except grpc.RpcError as error:
        return from_rpc_error(error)
    return None
