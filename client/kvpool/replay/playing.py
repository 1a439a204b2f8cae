"""A scheduler on a session of its own: how it plays, and what is left behind when it ends."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvpool.client import Client, KvpoolError, Session
from kvpool.replay.executor import Executor
from kvpool.replay.scheduler import Scheduler
from kvpool.replay.workload import Workload
from kvpool.wire.channels import Access


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How a scheduler plays its share.

    Attributes:
        address: The service.
        pool: Name of the pool, which is there.
        lease_seconds: Lease of its session; 0 for the server's default.
        max_num_seqs: Most requests running at once.
        max_num_batched_tokens: Most tokens given room in a round.
        open_executor: Makes what runs the rounds of a session, until it is left; None for one that computes nothing.
        start_after_requests: Requests that a scheduler has done before the next one begins; 0: all at once.
        access: What is shown at the service's door.
    """

    address: str
    pool: str
    lease_seconds: float
    max_num_seqs: int
    max_num_batched_tokens: int
    open_executor: Callable[[Session], AbstractContextManager[Executor]] | None = None
    start_after_requests: int = 0
    access: Access = Access()  # noqa: RUF009 - frozen


@contextlib.contextmanager
def scheduler_on(
    client: Client, share: Workload, options: SchedulerOptions, client_name: str, advance: Callable[[], object]
) -> Iterator[Scheduler]:
    """Opens a session and yields a scheduler that can run; closes the session, however that ended.

    Args:
        client: A connection to the service.
        share: What to play.
        options: How.
        client_name: Tells people which scheduler this is.
        advance: Called for each request that is done with.
    """
    session = client.open_session(options.pool, client_name=client_name, lease_seconds=options.lease_seconds)
    try:
        with options.open_executor(session) if options.open_executor else contextlib.nullcontext() as executor:
            yield Scheduler(
                session,
                share,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                advance=advance,
                executor=executor,
            )
    except BaseException:
        with contextlib.suppress(KvpoolError):  # mostly it is gone already; what went wrong first is what is told
            session.close()
        raise
    session.close()
