"""What etcd's errors mean, as sentences that name the member of etcd which returned them."""

from typing import Final

import grpc

from kvpool.server.cluster.directory import DirectoryError

_TEMPORARY: Final = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # A member that stops, and a connection that breaks, have been seen to end calls with these.
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}
_SENTENCES: Final = {
    "etcdserver: no leader": "it has no leader; a majority of etcd's members may be down",
    "etcdserver: mvcc: database space exceeded": (
        "its database is full (alarm NOSPACE): compact and defragment it, then disarm the alarm"
    ),
    "etcdserver: permission denied": "the user lacks a permission; it needs to read and write /kvpool/",
    "etcdserver: authentication failed, invalid user ID or password": "it does not accept the user or the password",
    "etcdserver: user name is empty": "it requires a user and a password",
    "etcdserver: authentication is not enabled": "a user is set, but its authentication is not enabled",
}
_STALE_TOKEN: Final = ("etcdserver: invalid auth token", "etcdserver: revision of auth store is old")


class EtcdUnavailableError(DirectoryError):
    """No member of etcd answers now. A later call may succeed."""


def error_of(endpoint: str, error: grpc.aio.AioRpcError) -> DirectoryError:
    """Converts the error of a call; EtcdUnavailableError if a repetition may succeed."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        sentence = "it did not answer in time"
    else:
        sentence = _SENTENCES.get(details, f"{error.code().name}: {details}")
    kind = EtcdUnavailableError if error.code() in _TEMPORARY else DirectoryError
    return kind(f"etcd at {endpoint}: {sentence}")


def is_stale_token(error: grpc.aio.AioRpcError) -> bool:
    """Whether the call was not executed because its token has expired, or is older than a change of users."""
    return error.details() in _STALE_TOKEN
