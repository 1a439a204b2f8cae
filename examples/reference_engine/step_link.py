"""A scheduler's side of the link to the ranks, which sends only new tokens and blocks. See also `step_server`."""

import uuid
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from examples.reference_engine.step import RequestStep, StepInput, StepOutput
from kvpool.client import KvpoolError, Request, Session, UnavailableError
from kvpool.core.ids import TableLease
from kvpool.replay.executor import Scheduled

_Pipe: TypeAlias = "Connection[Any, Any]"


class StepRefusedError(KvpoolError):
    """The ranks refused a step and changed nothing: EPOCH_PASSED or SESSION_ENDED if its blocks may have new owners."""


class StepLink:
    """Runs a scheduler's steps on the ranks. A context manager."""

    def __init__(self, path: Path, authkey: bytes, lease: TableLease) -> None:
        """Connects.

        Args:
            path: Socket of rank 0.
            authkey: Shared secret of the ranks.
            lease: Lease of the scheduler's session.
        """
        self._pipe: _Pipe = Client(str(path), "AF_UNIX", authkey)
        self._lease = lease
        self._session = uuid.uuid4().hex
        self._sent: dict[str, _Sent] = {}

    @classmethod
    def of_session(cls, path: Path, authkey: bytes, session: Session) -> "StepLink":
        """Connects for a session of the pool. Ranks on lent memory name it to the lender before it has blocks."""
        link = cls(path, authkey, session.table_lease)
        link._run(StepInput(link._lease, link._session))
        return link

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def execute(self, scheduled: Sequence[Scheduled], released: Iterable[Request]) -> list[int]:
        """See `kvpool.replay.executor.Executor`.

        Raises:
            StepRefusedError: The ranks refused the step.
            UnavailableError: The ranks have ended.
        """
        step = StepInput(self._lease, self._session)
        for request in released:
            if self._sent.pop(request.request_id, None):
                step.released.append(request.request_id)
        step.requests += (self._describe(entry) for entry in scheduled if entry.num_scheduled_tokens)
        return self._run(step) if step.requests or step.released else []

    def _run(self, step: StepInput) -> list[int]:
        try:
            self._pipe.send(step)
            output: StepOutput = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise UnavailableError("RANKS_GONE", "the ranks ended the link while a step ran") from error
        if output.refusal:
            raise StepRefusedError(*output.refusal)
        return output.next_token_ids

    def close(self) -> None:
        """Ends the session on the ranks."""
        self._pipe.close()

    def _describe(self, entry: Scheduled) -> RequestStep:
        """Describes the tokens and blocks of a request that the ranks have not received."""
        request = entry.request
        sent = self._sent.get(request.request_id)
        is_new = sent is None
        if sent is None:
            sent = self._sent[request.request_id] = _Sent([0] * len(request.block_ids))
        described = RequestStep(
            request.request_id,
            is_new,
            entry.num_executed_tokens,
            entry.num_scheduled_tokens,
            request.token_ids[sent.num_tokens :],
            [table[count:] for table, count in zip(request.block_ids, sent.num_blocks, strict=True)],
        )
        sent.num_tokens = request.num_tokens
        sent.num_blocks = [len(table) for table in request.block_ids]
        return described


class _Sent:
    """Number of tokens, and of blocks per group, that the ranks have received for a request."""

    __slots__ = ("num_blocks", "num_tokens")

    def __init__(self, num_blocks: list[int]) -> None:
        self.num_tokens = 0
        self.num_blocks = num_blocks
