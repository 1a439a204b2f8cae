"""What the servers of a shard say on the link that carries records; `kvpool.wire.link` has the frames and their order.

1. A standby connects and sends its hello. The primary answers with a welcome, or with a refusal.
2. Each answer is a position: the frame of a record as it is in the journal, or a mark, which is empty. The first one
   follows the position in the welcome. The frames of a snapshot come before it, unless the standby resumes.
3. A request of the standby is the last position that it has executed.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from platform import python_version
from typing import Final

import kvpool.core
from kvpool.core.errors import WrongStateError
from kvpool.server.cluster.directory import Member
from kvpool.server.codec import DamageError, decode, dumps, encode, loads
from kvpool.server.journal.folder import FORMAT
from kvpool.v1.link_pb2 import LinkHello, LinkWelcome
from kvpool.wire import changes, link, steps
from kvpool.wire.errors import ServerError
from kvpool.wire.frames import encode_frame
from kvpool.wire.protocol_version import PROTOCOL_VERSION

OTHER_VERSION: Final = "OTHER_VERSION"
"""Reason for which a server of another version is refused, unless the primary hands over to it."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A standby, and what it has.

    Attributes:
        shard: Name of the shard, which both servers must have.
        core: `core_fingerprint` of the standby.
        member: The standby.
        term: Term that it follows.
        resumed_term: Term in which it has followed before; 0 if it needs a snapshot.
        resumed_position: Last position that it has executed in that term.
    """

    shard: str
    core: str
    member: Member
    term: int
    resumed_term: int
    resumed_position: int


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


def hello(token: str, message: Hello) -> bytes:
    """Encodes the first frame of a standby."""
    return link.hello(LinkHello(token=token, replication=encode(Hello, message)))


def read_hello(payload: bytes) -> tuple[str, Hello]:
    """Decodes the first frame of a standby. Returns its token, and the rest.

    Raises:
        KvpoolError: As `link.read_hello`.
        DamageError: It is malformed.
    """
    try:
        message = link.read_hello(payload, "replication")
    except WrongStateError as error:
        text = "the servers run versions that do not understand each other: plan a restart with the journal"
        raise WrongStateError(error.reason, text, field=error.field) from None
    return message.token, decode(Hello, message.replication)


def welcome(message: Welcome) -> bytes:
    """Encodes the answer to a hello."""
    return link.welcome(LinkWelcome(replication=encode(Welcome, message)))


def read_welcome(payload: bytes) -> Welcome:
    """Decodes the answer to a hello. Raises DamageError if it is malformed, or of another protocol version."""
    try:
        return decode(Welcome, link.read_welcome(payload).replication)
    except ServerError as error:
        raise DamageError(str(error)) from None


def acknowledgement(position: int) -> bytes:
    """Encodes the frame that acknowledges a position."""
    return encode_frame(link.Kind.REQUEST, dumps(position))


def acknowledged_position(payload: bytes) -> int:
    """Decodes a position. Raises DamageError if it is malformed."""
    position = loads(payload)
    if type(position) is not int:
        raise DamageError("an acknowledgement without a position")
    return position


@cache
def core_fingerprint() -> str:
    """Fingerprint of what decides the results of records.

    That is the core, the reading of steps, the protocol, the form of records and snapshots, and Python. Servers with
    the same fingerprint execute the same records with the same results.
    """
    digest = hashlib.sha256(f"{PROTOCOL_VERSION} {FORMAT} {python_version()}".encode())
    core = (source for folder in kvpool.core.__path__ for source in sorted(Path(folder).rglob("*.py")))
    for source in (*core, Path(changes.__file__), Path(steps.__file__)):
        digest.update(f"{source.parent.name}/{source.name}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]
