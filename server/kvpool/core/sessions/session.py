"""A scheduler process attached to a pool: its requests, its count of changes, its lease.

1. Request ids and numbers are unique in their session, and nothing reaches another session's requests.
2. Changes are numbered from 1 without gaps. The same number again gets the same answer again and changes nothing; a
   number that was used for something else, or that comes too early, is refused.
3. A session lives while its stream is open and for its lease after it was last heard of.
4. One process drives it: resuming it gives it another id and another number. The ids before are good for nothing but to
   resume it; the numbers before are those of sessions that have ended, for ranks that hold block tables of theirs.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.errors import InvalidArgumentError, WrongStateError
from kvpool.core.ids import RequestId, RequestNumber, SessionId, SessionNumber, StepNumber
from kvpool.core.sessions.request import Holding, Request
from kvpool.core.steps.columns import StepResult

REMEMBERED_RESULTS: Final = 16
REMEMBERED_ENTRIES: Final = 2**20
"""Entries of columns and queues in all remembered steps and results together; the newest is kept in any case."""
REMEMBERED_RESUME_KEYS: Final = 16
MAX_KEY_BYTES: Final = 64
_RESUMPTION_MARK: Final = "~"
"""Between the id that a session was opened with and the number of its resumption; in no id that we draw."""


@dataclass(frozen=True, slots=True)
class LeaseBounds:
    """How long leases may be.

    Attributes:
        min_lease_seconds: The shortest, at least 0.1.
        max_lease_seconds: The longest, at most a day.
        default_lease_seconds: That of a session which asks for none.
    """

    min_lease_seconds: float = 1.0
    max_lease_seconds: float = 3600.0
    default_lease_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 0.1 <= self.min_lease_seconds <= 86400:  # noqa: PLR2004 - the message states it
            raise ValueError(f"min_lease_seconds: {self.min_lease_seconds} is not in [0.1, 86400]")
        if not self.min_lease_seconds <= self.max_lease_seconds <= 86400:  # noqa: PLR2004 - likewise
            raise ValueError(f"max_lease_seconds: {self.max_lease_seconds} is not in [min_lease_seconds, 86400]")
        if not self.min_lease_seconds <= self.default_lease_seconds <= self.max_lease_seconds:
            raise ValueError(
                f"default_lease_seconds: {self.default_lease_seconds} is not in [min_lease_seconds, max_lease_seconds]"
            )

    def choose(self, asked_seconds: float) -> float:
        """The lease of a session that asks for so many seconds, or with 0 for the default.

        Raises:
            InvalidArgumentError: It is out of bounds.
        """
        lease_seconds = asked_seconds or self.default_lease_seconds
        if not self.min_lease_seconds <= lease_seconds <= self.max_lease_seconds:
            bounds = f"[{self.min_lease_seconds:g}, {self.max_lease_seconds:g}]"
            raise InvalidArgumentError("lease_seconds", f"{lease_seconds} is not in {bounds}")
        return lease_seconds


def check_key(field_name: str, key: str) -> None:
    """Raises InvalidArgumentError if a key that makes a call repeatable is too long."""
    if len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise InvalidArgumentError(field_name, f"longer than {MAX_KEY_BYTES} bytes")


def original_id(session_id: str) -> SessionId:
    """The id that a session was opened with, of any that it had."""
    return SessionId(session_id.partition(_RESUMPTION_MARK)[0])


@dataclass(slots=True, eq=False)
class Session:
    """One session of a pool.

    Attributes:
        session_id: Its name, a secret between client and server, as it was opened.
        session_number: Its number, which no other has or had; another each time that it is resumed.
        client_name: What it says it is.
        lease_seconds: How long it outlives its stream and its last call.
        last_seen_seconds: When it was last heard of, on the server's monotonic clock.
        open_key: What made opening it repeatable; empty for nothing.
        asked_for: What it was opened with, compared when the key comes again.
        holding: The blocks that its requests hold, if it has a quota.
        opened_seconds: When it was opened, on the same clock.
        current_id: The id that the process which drives it has.
        previous_number: The number that it had before it was resumed last; 0 if it never was.
        owner: Name of the token that opened it; empty where none was asked for.
        salt: Sets its hashes apart from those of sessions with another; a secret.
        open_streams: Streams that keep it alive.
        sequence: Number of its last change.
        executed_sequence: Newest change that it said to be executed.
        launched_sequence: Newest change whose execution it said to be sure to come.
        num_tokens: Tokens known of its requests, together.
        requests: Its requests, in the order they were added.
        by_number: The same by number.
    """

    session_id: SessionId = field(repr=False)
    session_number: SessionNumber
    client_name: str
    lease_seconds: float
    last_seen_seconds: float
    open_key: str = field(default="", repr=False)
    asked_for: tuple[object, ...] = ()
    holding: Holding | None = None
    opened_seconds: float = field(init=False)
    current_id: SessionId = field(init=False, repr=False)
    previous_number: SessionNumber = field(init=False, default=SessionNumber(0))
    owner: str = ""
    salt: bytes = field(default=b"", repr=False)
    open_streams: int = 0
    sequence: StepNumber = StepNumber(0)  # noqa: RUF009 - a NewType of int is immutable
    executed_sequence: StepNumber = StepNumber(0)  # noqa: RUF009 - a NewType of int is immutable
    launched_sequence: StepNumber = StepNumber(0)  # noqa: RUF009 - a NewType of int is immutable
    num_tokens: int = 0
    requests: dict[RequestId, Request] = field(default_factory=dict)
    by_number: dict[RequestNumber, Request] = field(default_factory=dict)
    _results: OrderedDict[int, tuple[object, StepResult, int]] = field(default_factory=OrderedDict)
    _remembered_entries: int = 0
    _resumptions: int = 0
    _resume_keys: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_RESUME_KEYS))

    def __post_init__(self) -> None:
        self.opened_seconds = self.last_seen_seconds
        self.current_id = self.session_id

    def is_newest_resumption(self, key: str) -> bool | None:
        """Whether a key is that of the newest resumption (True), of an older one (False), or new (None)."""
        if key not in self._resume_keys:
            return None
        return key == self._resume_keys[-1]

    def resume(self, key: str, session_number: SessionNumber) -> None:
        """Gives it its next id, and a number that is new; what was launched is not known any more. O(requests)."""
        self.previous_number, self.session_number = self.session_number, session_number
        self.launched_sequence = StepNumber(0)
        for request in self.requests.values():
            request.session_number = session_number
        self._resumptions += 1
        self.current_id = SessionId(f"{self.session_id}{_RESUMPTION_MARK}{self._resumptions}")
        if key:
            self._resume_keys.append(key)

    @property
    def reports_execution(self) -> bool:
        """Whether what it did not say to be executed may not have been: it does say so, or another drives it."""
        return self.executed_sequence > 0 or self.previous_number > 0

    @property
    def expires_seconds(self) -> float:
        """When the lease runs out; infinity while a stream is open."""
        return float("inf") if self.open_streams else self.last_seen_seconds + self.lease_seconds

    def remembered_result(self, sequence: int, source: object) -> StepResult | None:
        """Returns the result of a change that is sent again, None for the next new one.

        Args:
            sequence: The change's number.
            source: What was sent, or a digest of it, compared with what came under this number before.

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

    def remember(self, source: object, result: StepResult, num_entries: int = 0) -> None:
        """Ends a change: counts it, and keeps its result in case it is sent again.

        Args:
            source: What was sent, or a digest of it.
            result: What became of it.
            num_entries: Entries of columns and queues that both keep.
        """
        self.sequence = StepNumber(result.sequence)
        results = self._results
        results[result.sequence] = (source, result, num_entries)
        self._remembered_entries += num_entries
        while len(results) > REMEMBERED_RESULTS or (self._remembered_entries > REMEMBERED_ENTRIES and len(results) > 1):
            self._remembered_entries -= results.popitem(last=False)[1][2]

    def check_executed(self, executed_sequence: int, last: int) -> None:
        """Checks a claim that the changes up to `executed_sequence` were executed, where `last` was sent before it.

        Raises:
            InvalidArgumentError: It claims changes that were not sent yet.
        """
        if not 0 <= executed_sequence <= last:
            raise InvalidArgumentError("executed_sequence", f"{executed_sequence} is not in [0, {last}]")

    def check_launched(self, launched_sequence: int) -> None:
        """Raises InvalidArgumentError if it is said that changes are launched which were not made yet."""
        if not 0 <= launched_sequence <= self.sequence:
            raise InvalidArgumentError("launched_sequence", f"{launched_sequence} is not in [0, {self.sequence}]")

    def request_number(self, request_id: RequestId) -> RequestNumber | None:
        """The number of a request, if the session has it."""
        request = self.requests.get(request_id)
        return request.number if request else None

    def free_number(self) -> RequestNumber:
        """A number that no client can choose, for a request that was given none."""
        return RequestNumber(min((0, *self.by_number)) - 1)

    def add(self, request: Request) -> None:
        """Takes a request in, whose id and number are new; the caller counts its tokens, as those it grows by."""
        self.requests[request.request_id] = request
        self.by_number[request.number] = request

    def forget(self, request: Request) -> None:
        """Lets a request go, whose blocks are freed."""
        del self.requests[request.request_id]
        del self.by_number[request.number]
        self.num_tokens -= request.num_tokens
