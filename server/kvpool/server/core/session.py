"""A scheduler process attached to a pool: its requests, its count of changes, its lease.

1. Request ids and numbers are unique in their session, and nothing reaches another session's requests.
2. Changes are numbered from 1 without gaps. The same number again gets the same answer again and changes nothing; a
   number that was used for something else, or that comes too early, is refused.
3. A session lives while its stream is open and for its lease after it was last heard of.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from kvpool.server.core.errors import InvalidArgumentError, WrongStateError
from kvpool.server.core.request import Request
from kvpool.server.core.step import StepResult
from kvpool.server.core.types import RequestId, RequestNumber, Sequence, SessionId, WriterId

REMEMBERED_RESULTS: Final = 16


@dataclass(slots=True, eq=False)
class Session:
    """One session of a pool.

    Attributes:
        session_id: Its name, a secret between client and server.
        writer: Its number in the pool.
        client_name: What it says it is.
        lease_seconds: How long it outlives its stream and its last call.
        heard_seconds: When it was last heard of, on the server's monotonic clock.
        opened_seconds: When it was opened, on the same clock.
        open_streams: Streams that keep it alive.
        sequence: Number of its last change.
        executed_sequence: Newest change that it said to be executed.
        requests: Its requests, in the order they were added.
        by_number: The same by number.
    """

    session_id: SessionId
    writer: WriterId
    client_name: str
    lease_seconds: float
    heard_seconds: float
    opened_seconds: float = field(init=False)
    open_streams: int = 0
    sequence: Sequence = Sequence(0)  # noqa: RUF009 - a NewType of int is immutable
    executed_sequence: Sequence = Sequence(0)  # noqa: RUF009 - a NewType of int is immutable
    requests: dict[RequestId, Request] = field(default_factory=dict)
    by_number: dict[RequestNumber, Request] = field(default_factory=dict)
    _results: OrderedDict[int, tuple[object, StepResult]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.opened_seconds = self.heard_seconds

    @property
    def expires_seconds(self) -> float:
        """When the lease runs out; infinity while a stream is open."""
        return float("inf") if self.open_streams else self.heard_seconds + self.lease_seconds

    def answered(self, sequence: int, source: object) -> StepResult | None:
        """Returns the result of a change that is sent again, None for the next new one.

        Args:
            sequence: The change's number.
            source: What was sent, compared with what came under this number before.

        Raises:
            InvalidArgumentError: The number is 0, or was used for something else.
            WrongStateError: The number comes too early, or is too old for its result to be remembered.
        """
        expected = self.sequence + 1
        if sequence == expected:
            return None
        if sequence < 1:
            raise InvalidArgumentError("sequence", "missing; numbers start at 1")
        if sequence > expected:
            raise WrongStateError("SEQUENCE_GAP", f"{sequence} skips changes, {expected} is next", field="sequence")
        remembered = self._results.get(sequence)
        if remembered is None:
            raise WrongStateError(
                "SEQUENCE_FORGOTTEN",
                f"the result of {sequence} is forgotten, {expected} is next",
                field="sequence",
            )
        if remembered[0] != source:
            raise InvalidArgumentError("sequence", f"{sequence} was used for something else", reason="SEQUENCE_REUSED")
        return remembered[1]

    def remember(self, source: object, result: StepResult) -> None:
        """Ends a change: counts it, and keeps its result in case it is sent again."""
        self.sequence = Sequence(result.sequence)
        self._results[result.sequence] = (source, result)
        if len(self._results) > REMEMBERED_RESULTS:
            self._results.popitem(last=False)

    def check_executed(self, executed_sequence: int, last: int) -> None:
        """Checks a claim that the changes up to `executed_sequence` were executed, where `last` was sent before it.

        Raises:
            InvalidArgumentError: It claims changes that were not sent yet.
        """
        if not 0 <= executed_sequence <= last:
            raise InvalidArgumentError("executed_sequence", f"{executed_sequence} is not in [0, {last}]")

    def number_of(self, request_id: RequestId) -> RequestNumber | None:
        """The number of a request, if the session has it."""
        request = self.requests.get(request_id)
        return request.number if request else None

    def free_number(self) -> RequestNumber:
        """A number that no client can choose, for a request that was given none."""
        return RequestNumber(min((0, *self.by_number)) - 1)

    def add(self, request: Request) -> None:
        """Takes a request in, whose id and number are new."""
        self.requests[request.request_id] = request
        self.by_number[request.number] = request

    def forget(self, request: Request) -> None:
        """Lets a request go, whose blocks are freed."""
        del self.requests[request.request_id]
        del self.by_number[request.number]
