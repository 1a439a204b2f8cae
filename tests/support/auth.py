"""Certificates and tokens for tests of authentication."""

import hashlib
import queue
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from kvpool.client import KvpoolError
from kvpool.wire.channels import ClientCredentials, TlsConfig
from kvpool.wire.errors import from_rpc_error
from support.waiting import DEADLINE_SECONDS

Entry = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    cert: Path
    key: Path

    def copy_over(self, used: "Pair") -> None:
        """Replaces the files that a server uses by copies of these, the key first."""
        for source, target in ((self.key, used.key), (self.cert, used.cert)):
            shutil.copy(source, target.with_suffix(".new"))
            target.with_suffix(".new").replace(target)


class Authority:
    """A certificate authority, with its certificate in a file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ca = trustme.CA()
        self._folder, self._name, self._count = folder, name, 0
        self.path = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.path))

    def issue(self, *names: str, days: float = 1.0, begin_days: float = -10.0) -> Pair:
        """Issues a certificate for names, valid from `begin_days` to `days` from now."""
        self._count += 1
        begin, end = (datetime.now(UTC) + timedelta(days=each) for each in (begin_days, days))
        issued = self._ca.issue_cert(*names, not_before=begin, not_after=end)
        stem = f"{self._name}-{self._count}"
        pair = Pair(self._folder / f"{stem}.pem", self._folder / f"{stem}.key")
        pair.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        pair.key.write_bytes(issued.private_key_pem.bytes())
        return pair

    def trusted_by(self, pair: Pair | None = None, server_name: str = "") -> TlsConfig:
        """TLS settings of a client that trusts this authority."""
        return TlsConfig(self.path, pair.cert if pair else None, pair.key if pair else None, server_name)


def secret_of(name: str) -> str:
    """The token of an entry of `write_tokens`."""
    return f"kvp_{name}-secret"


def write_tokens(path: Path, entries: list[Entry]) -> None:
    """Writes a token file. Adds the sha256 to each entry."""
    lines = []
    for entry in entries:
        digest = hashlib.sha256(secret_of(entry["name"]).encode()).hexdigest()
        lines.append("[[token]]")
        lines += [f"{key} = {value!r}" for key, value in {"sha256": digest, **entry}.items() if key != "expires"]
        if "expires" in entry:
            lines.append(f"expires = {entry['expires']}")
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(lines))
    fresh.chmod(0o600)
    fresh.replace(path)


def channel(address: str, token: str | None = None, tls: TlsConfig | None = None) -> grpc.Channel:
    """A channel whose calls carry a token."""
    return ClientCredentials(tls, token).channel(address, (("grpc.max_reconnect_backoff_ms", 200),))


class Silent:
    """A call without a request, until `send`."""

    def __init__(self, opened: grpc.Channel, method: str, ended: "queue.SimpleQueue[Silent] | None" = None) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        start: Any = opened.stream_stream(f"/{method}")
        self._call = start(iter(self._outgoing.get, None), timeout=DEADLINE_SECONDS)
        if ended is not None:
            self._call.add_done_callback(lambda _: ended.put(self))

    def send(self, message: bytes) -> None:
        self._outgoing.put(message)

    def answer(self) -> object:
        """Waits for the next response."""
        return next(self._call)

    def error(self) -> KvpoolError:
        """Waits for the error that ends the call."""
        with pytest.raises(grpc.RpcError) as caught:
            next(self._call)
        self.close()
        return from_rpc_error(caught.value)

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
