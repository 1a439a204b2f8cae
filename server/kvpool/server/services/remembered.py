"""What a session keeps of a change, to tell one that is sent again from another under its number."""

import hashlib
from typing import Final, Protocol

from google.protobuf.descriptor import Descriptor

KEPT_BYTES: Final = 2**16
"""A message that is not longer is kept itself; parsed, one takes up to ten times its bytes."""


class Sent(Protocol):
    """What all messages have."""

    DESCRIPTOR: Descriptor

    def ByteSize(self) -> int: ...  # noqa: D102, N802 - protobuf's
    def SerializeToString(self, *, deterministic: bool = ...) -> bytes: ...  # noqa: D102, N802 - protobuf's


def remembered(message: Sent) -> Sent | bytes:
    """The message, or where it is long a digest of its kind and contents."""
    if message.ByteSize() <= KEPT_BYTES:
        return message
    digest = hashlib.sha256(f"{message.DESCRIPTOR.full_name}:".encode())
    digest.update(message.SerializeToString(deterministic=True))
    return digest.digest()
