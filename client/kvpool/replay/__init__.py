"""Workloads (traces of requests, generated chats) and the schedulers that play them on a pool."""


class ChildError(RuntimeError):
    """A child process failed; the message says why."""
