"""Sessions: a scheduler process attached to a pool, with its requests, its step numbers and its lease.

1. Request ids and request numbers are unique in their session. A session cannot reach another session's requests.
2. Steps are numbered from 1 without gaps. A step that is sent again gets the same result again and changes nothing. A
   number that is too high, or that was used for a different step, is refused.
3. A session lives while its stream is open, and for the duration of its lease after its last call. While blocks that it
   has freed wait for its steps, it must report an executed step every MAX_STEP_SECONDS.
4. One process drives a session. A scheduler that restarts opens another session.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import inf
from typing import Final

from kvpool.core.errors import InvalidArgumentError, WrongStateError, check_setting, check_size
from kvpool.core.ids import MapId, RequestId, RequestNumber, Scope, SessionId, SessionNumber, StepNumber
from kvpool.core.sessions.request import BlockCopy, Holding, Request, RequestsCopy
from kvpool.core.snapshots import left_out
from kvpool.core.steps.columns import StepResult

REMEMBERED_RESULTS: Final = 16
REMEMBERED_ENTRIES: Final = 2**20
"""Maximum number of column and queue entries in all remembered steps and results; the newest is always kept."""
REMEMBERED_KEYS: Final = 16
MAX_KEY_BYTES: Final = 64
MAX_WEIGHTS_VERSION_BYTES: Final = 256
MAX_RESERVE_TOKENS: Final = 4096
MAX_STEP_SECONDS: Final = 600.0
"""No step takes as long: vLLM ends an engine whose step takes 300 s."""


@dataclass(frozen=True, slots=True)
class LeaseBounds:
    """Bounds for the duration of leases.

    Attributes:
        min_lease_seconds: Shortest lease, at least 0.1.
        max_lease_seconds: Longest lease, at most a day.
        default_lease_seconds: Lease of a session that requests none.
    """

    min_lease_seconds: float = 1.0
    max_lease_seconds: float = 3600.0
    default_lease_seconds: float = 10.0

    def __post_init__(self) -> None:
        check_setting("min_lease_seconds", self.min_lease_seconds, 0.1, 86400)
        if not self.min_lease_seconds <= self.max_lease_seconds <= 86400:  # noqa: PLR2004 - the message states it
            raise ValueError(f"max_lease_seconds: {self.max_lease_seconds} is not in [min_lease_seconds, 86400]")
        if not self.min_lease_seconds <= self.default_lease_seconds <= self.max_lease_seconds:
            raise ValueError(
                f"default_lease_seconds: {self.default_lease_seconds} is not in [min_lease_seconds, max_lease_seconds]"
            )

    def choose(self, requested_seconds: float) -> float:
        """Returns the lease for the requested number of seconds, or the default if 0 is requested.

        Raises:
            InvalidArgumentError: The requested lease is out of bounds.
        """
        lease_seconds = requested_seconds or self.default_lease_seconds
        if not self.min_lease_seconds <= lease_seconds <= self.max_lease_seconds:
            bounds = f"[{self.min_lease_seconds:g}, {self.max_lease_seconds:g}]"
            raise InvalidArgumentError("lease_seconds", f"{lease_seconds} is not in {bounds}")
        return lease_seconds


def check_key(field_name: str, key: str) -> None:
    """Raises InvalidArgumentError if an idempotency key is too long."""
    check_size(field_name, key, MAX_KEY_BYTES)


def is_newest_key(keys: Sequence[str], key: str) -> bool | None:
    """Whether a key is the newest of these keys of earlier calls (True), an older one (False), or unknown (None)."""
    if key not in keys:
        return None
    return key == keys[-1]


def with_key(keys: list[str], key: str) -> list[str]:
    """Returns the newest keys after a call with this key; empty for none."""
    return [*keys, key][-REMEMBERED_KEYS:] if key and key not in keys else keys


def check_weights_version(weights_version: str) -> None:
    """Raises InvalidArgumentError if a weights version is too long."""
    check_size("weights_version", weights_version, MAX_WEIGHTS_VERSION_BYTES)


@dataclass(slots=True)
class RememberedResult:
    """The result of a step, kept in case the step is sent again. Never changed.

    Attributes:
        digest: SHA-256 of the step's message, which needs less memory than the message.
        result: The result.
    """

    digest: bytes
    result: StepResult


@dataclass(slots=True, eq=False)
class Session:
    """One session of a pool.

    Attributes:
        session_id: Its id, a secret between client and server.
        session_number: Unique number of the session.
        client_name: Name that the client reports.
        lease_seconds: How long the session outlives its stream and its last call.
        last_seen_seconds: Time of the last call, on the server's monotonic clock.
        open_key: Idempotency key of the open call; empty for none.
        open_arguments: Arguments of the open call, compared when the key is used again.
        holding: The blocks that the session's requests hold, if it has a quota.
        opened_seconds: When the session was opened, on the same clock.
        owner: Name of the token that opened the session; empty if authentication is off.
        salt: Separates the session's hashes from those of sessions with another salt; a secret.
        namespace: Separates the session's cached blocks from those of sessions with another namespace.
        weights_version: Separates them from those of sessions with other weights; empty if the weights never change.
        first_map: First map of the session's scope in the pool's prefix map.
        reserve_tokens: Number of tokens for which running requests hold slots beyond those that they need, while enough
            blocks are free; 0 for none.
        owes_reserve: Whether another session was refused blocks, and this one does not know.
        open_streams: Number of open streams that keep the session alive.
        sequence: Number of the last step.
        executed_sequence: Most recent step that the session reported as executed.
        launched_sequence: Most recent step that the session reported as certain to be executed.
        waits_since_seconds: If freed blocks wait for its steps, when they began to, or the later time at which it
            reported an executed step; else infinity.
        num_tokens: Known tokens of all its requests together.
        copies: Copies of its steps that may still have to be made, in order. They hold their blocks, also after their
            requests are freed.
        num_running: Number of requests with computed tokens.
        requests: The requests, in the order in which they were added.
        requests_copy: A copy of the requests, while a snapshot is read.
        by_number: The same requests by number.
        results: The newest results by step number, oldest first.
        num_result_entries: Entries of these results together.
        weights_keys: The newest keys of calls that set the weights version, oldest first.
    """

    session_id: SessionId = field(repr=False)
    session_number: SessionNumber
    client_name: str
    lease_seconds: float
    last_seen_seconds: float
    open_key: str = field(default="", repr=False)
    open_arguments: tuple[str | float, ...] = ()
    holding: Holding | None = None
    opened_seconds: float = field(init=False)
    owner: str = ""
    salt: bytes = field(default=b"", repr=False)
    namespace: bytes = b""
    weights_version: str = ""
    first_map: MapId = MapId(0)  # noqa: RUF009 - a NewType of int is immutable
    reserve_tokens: int = 0
    owes_reserve: bool = False
    open_streams: int = 0
    sequence: StepNumber = StepNumber(0)  # noqa: RUF009 - a NewType of int is immutable
    executed_sequence: StepNumber = StepNumber(0)  # noqa: RUF009 - a NewType of int is immutable
    launched_sequence: StepNumber = StepNumber(0)  # noqa: RUF009 - a NewType of int is immutable
    waits_since_seconds: float = inf
    num_tokens: int = 0
    copies: list[BlockCopy] = field(default_factory=list)
    num_running: int = field(default=0, metadata=left_out("follows from requests"))
    requests_copy: RequestsCopy | None = field(default=None, metadata=left_out("belongs to a snapshot"))
    requests: dict[RequestId, Request] = field(default_factory=dict, metadata=left_out("are a column"))
    by_number: dict[RequestNumber, Request] = field(default_factory=dict, metadata=left_out("follows from requests"))
    results: OrderedDict[int, RememberedResult] = field(default_factory=OrderedDict, metadata=left_out("are a column"))
    num_result_entries: int = field(default=0, metadata=left_out("follows from results"))
    weights_keys: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.opened_seconds = self.last_seen_seconds

    @property
    def scope(self) -> Scope:
        """What its cached blocks belong to."""
        return self.namespace, self.weights_version

    @property
    def reports_execution(self) -> bool:
        """Whether a step not reported as executed may not have run: the session reports execution."""
        return self.executed_sequence > 0

    @property
    def expires_seconds(self) -> float:
        """When the lease expires, see rule 3; infinity if it does not."""
        lease_end_seconds = inf if self.open_streams else self.last_seen_seconds + self.lease_seconds
        return min(lease_end_seconds, self.waits_since_seconds + MAX_STEP_SECONDS)

    def is_expired(self, now_seconds: float) -> bool:
        """Whether the lease has expired."""
        return self.expires_seconds <= now_seconds

    def remembered_result(self, sequence: int, message: bytes) -> StepResult | None:
        """Returns the result of a step that is sent again; None for the next new step.

        Args:
            sequence: Number of the step.
            message: The step as sent, compared with the earlier step of this number.

        Raises:
            InvalidArgumentError: The number is 0, or was used for a different step.
            WrongStateError: The number is too high, or too old for its result to be remembered.
        """
        expected = self.sequence + 1
        if sequence == expected:
            return None
        if sequence < 1:
            raise InvalidArgumentError("sequence", "missing; numbers start at 1")
        if sequence > expected:
            raise WrongStateError("SEQUENCE_GAP", f"{sequence} skips changes, {expected} is next", field="sequence")
        remembered = self.results.get(sequence)
        if remembered is None:
            raise WrongStateError(
                "SEQUENCE_FORGOTTEN",
                f"the result of {sequence} is forgotten, {expected} is next",
                field="sequence",
            )
        if remembered.digest != sha256(message).digest():
            raise InvalidArgumentError("sequence", f"{sequence} was used for something else", reason="SEQUENCE_REUSED")
        return remembered.result

    def remember(self, message: bytes, result: StepResult) -> None:
        """Completes a step: advances the step number, and keeps the result in case the step is sent again.

        Args:
            message: The step as sent.
            result: Result of the step.
        """
        self.sequence = StepNumber(result.sequence)
        results = self.results
        results[result.sequence] = RememberedResult(sha256(message).digest(), result)
        self.num_result_entries += result.num_entries
        while len(results) > REMEMBERED_RESULTS or (self.num_result_entries > REMEMBERED_ENTRIES and len(results) > 1):
            self.num_result_entries -= results.popitem(last=False)[1].result.num_entries

    def freeze(self) -> "Session":
        """Returns a copy of the session as it is now, without requests and results. O(blocks held with a quota)."""
        copied = copy(self)
        copied.requests, copied.by_number, copied.copies = {}, {}, list(self.copies)
        copied.requests_copy, copied.num_running = None, 0
        copied.results, copied.num_result_entries = OrderedDict(), 0
        if self.holding:
            copied.holding = replace(
                self.holding, counts=self.holding.counts.copy(), uncovered=self.holding.uncovered.copy()
            )
        return copied

    def copy_requests(self) -> RequestsCopy:
        """Returns the requests as they are now, to be read until `requests_copy` is removed. O(1)."""
        self.requests_copy = RequestsCopy(self.requests)
        return self.requests_copy

    def before_change(self, requests: Iterable[Request]) -> None:
        """Keeps requests that are about to change for a snapshot that is read. Call it also before `add` and `forget`.

        The first call of a snapshot copies references to all requests of the session, about 20 ns each.
        """
        if self.requests_copy:
            if self.requests_copy.requests is self.requests:
                self.requests = self.requests.copy()
            self.requests_copy.before_change(requests)

    def restore_request(self, request: Request) -> None:
        """Adds a request to a restored copy."""
        request.holding, request.first_map, request.copies = self.holding, self.first_map, self.copies
        request.reserve_tokens = self.reserve_tokens
        self.num_running += request.num_computed_tokens > 0
        self.add(request)

    def restore_result(self, remembered: RememberedResult) -> None:
        """Adds a result to a restored copy."""
        self.results[remembered.result.sequence] = remembered
        self.num_result_entries += remembered.result.num_entries

    def request_number(self, request_id: RequestId) -> RequestNumber | None:
        """Number of a request, if the session has it."""
        request = self.requests.get(request_id)
        return request.number if request else None

    def free_number(self) -> RequestNumber:
        """Returns a number that no client can choose, for the request without a number that the next step declares."""
        return RequestNumber(-1 - self.sequence)

    def add(self, request: Request) -> None:
        """Adds a request with a new id and number. The caller counts the request's tokens."""
        self.requests[request.request_id] = request
        self.by_number[request.number] = request

    def forget(self, request: Request) -> None:
        """Removes a request whose blocks were freed."""
        del self.requests[request.request_id]
        del self.by_number[request.number]
        self.num_tokens -= request.num_tokens
