"""Checks what a server would read and write, without starting it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kvpool.server.auth.certificates import Certificates
from kvpool.server.auth.tokens import read_tokens
from kvpool.server.config import ServerConfig
from kvpool.server.limits.connections import max_connections, raise_file_limit


def find_problems(config: ServerConfig) -> list[str]:
    """Returns what would keep a server from starting, each with the name of the setting.

    Reads the certificates and the token file, and changes no file. Does not check whether the addresses and the journal
    are in use, so that the settings of a running server can be checked.
    """
    return [str(error) for check in _checks(config) if (error := _failure(check))]


def _checks(config: ServerConfig) -> Iterator[Callable[[], object]]:
    auth, folder, limits = config.auth, config.journal.folder, config.limits
    if auth.tls_cert:
        yield lambda: Certificates(auth, config.cluster.replication_tls_ca)
    if auth.tokens:
        tokens = auth.tokens
        yield lambda: read_tokens(tokens)
    if folder:
        yield lambda: check_folder(Path(folder))
    if config.cluster.url:
        from kvpool.server.shard_setup import own_member  # noqa: PLC0415 - others need no etcd

        yield lambda: own_member(config)
    raise_file_limit()
    yield lambda: max_connections(limits.max_connections, config.addresses)


def _failure(check: Callable[[], object]) -> ValueError | OSError | None:
    try:
        check()
    except (ValueError, OSError) as error:
        return error
    return None


def check_folder(folder: Path) -> None:
    """Raises ValueError unless a journal's folder, or the nearest one above in which it is made, can be written."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ValueError(f"journal: {existing}: is not a folder; no_journal serves without one")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"journal: {existing}: cannot be read and written by this user; no_journal serves without one")
