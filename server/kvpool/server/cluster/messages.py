"""What the servers of a shard send each other before records: who asks, and from where the primary sends.

1. A standby connects and sends HELLO. The primary answers WELCOME or REFUSED, within the time of a handshake.
2. After WELCOME the primary sends a snapshot, unless the standby resumes, and then each frame after the stated
   position: records and marks, one position per frame.
3. The standby sends ACKNOWLEDGED with the last position that it has executed.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from platform import python_version
from typing import Final

import kvpool.core
from kvpool.server.cluster.directory import Member
from kvpool.server.codec import DamageError, decode, dumps, encode, loads
from kvpool.server.journal.folder import FORMAT
from kvpool.server.journal.frames import FrameKind, encode_frame
from kvpool.wire import changes, steps

VERSION: Final = 3
"""Version of the stream between servers."""
OTHER_VERSION: Final = "OTHER_VERSION"
"""Reason for which a server of another version is refused, unless the primary hands over to it."""
MAX_HELLO_BYTES: Final = 16 * 1024
"""Maximum size of the first frame, which comes from a server that is not authenticated yet."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a standby.

    Attributes:
        version: Version of the stream.
        shard: Name of the shard, which both servers must have.
        core: `core_fingerprint` of the standby.
        token: Its token; empty for none.
        member: The standby.
        term: Term that it follows.
        resumed_term: Term in which it has followed before; 0 if it needs a snapshot.
        resumed_position: Last position that it has executed in that term.
    """

    version: int
    shard: str
    core: str
    token: str
    member: Member
    term: int
    resumed_term: int
    resumed_position: int

    def __repr__(self) -> str:
        return f"<Hello of {self.member.member_id} for term {self.term}>"


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer of the primary.

    Attributes:
        position: Position after which frames follow.
        resumes: Whether the standby continues with its state; if not, a snapshot follows.
        now_seconds: Time on the clock of the primary's leases.
    """

    position: int
    resumes: bool
    now_seconds: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Refusal of the primary.

    Attributes:
        reason: An UPPER_SNAKE_CASE constant.
        message: For people.
    """

    reason: str
    message: str


_KINDS: Final = {Hello: FrameKind.HELLO, Welcome: FrameKind.WELCOME, Refused: FrameKind.REFUSED}


def to_frame(message: Hello | Welcome | Refused) -> bytes:
    """Encodes a message as a frame."""
    return encode_frame(_KINDS[type(message)], encode(type(message), message))


def hello_of(payload: bytes) -> Hello:
    """Decodes a HELLO. Raises DamageError if it is malformed."""
    return decode(Hello, payload)


def answer_of(kind: FrameKind, payload: bytes) -> Welcome | Refused:
    """Decodes a WELCOME or REFUSED. Raises DamageError if it is malformed, or of another kind."""
    if kind is FrameKind.WELCOME:
        return decode(Welcome, payload)
    if kind is FrameKind.REFUSED:
        return decode(Refused, payload)
    raise DamageError(f"a {kind.name} instead of an answer")


def acknowledgement(position: int) -> bytes:
    """Encodes the frame that acknowledges a position."""
    return encode_frame(FrameKind.ACKNOWLEDGED, dumps(position))


def acknowledged_position(payload: bytes) -> int:
    """Decodes a position. Raises DamageError if it is malformed."""
    position = loads(payload)
    if type(position) is not int:
        raise DamageError("an acknowledgement without a position")
    return position


@cache
def core_fingerprint() -> str:
    """Fingerprint of what decides the results of records.

    That is the core, the reading of steps, the form of records and snapshots, and Python. Servers with the same
    fingerprint execute the same records with the same results.
    """
    digest = hashlib.sha256(f"{VERSION} {FORMAT} {python_version()}".encode())
    core = (source for folder in kvpool.core.__path__ for source in sorted(Path(folder).rglob("*.py")))
    for source in (*core, Path(changes.__file__), Path(steps.__file__)):
        digest.update(f"{source.parent.name}/{source.name}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]
