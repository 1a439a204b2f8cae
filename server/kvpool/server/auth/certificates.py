"""Server certificates: read, validated, and reloaded while the server runs.

1. An unreadable or mismatched pair of files never replaces a valid one, nor does a certificate that is expired, not yet
   valid, or not of the authorities of replication, if there are any.
2. Open connections keep their certificate. Each new connection gets the current one.
"""

import contextlib
import logging
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvpool.server.auth.config import AuthConfig
from kvpool.server.auth.files import ReloadedFiles

_log = logging.getLogger("kvpool.server.auth")


@dataclass(frozen=True, slots=True)
class _Certificate:
    """A certificate with its key.

    Attributes:
        contents: Contents of the files: the key, the certificate chain and, if configured, the authorities for client
            certificates.
        expires_seconds: When the certificate expires, in seconds since 1970.
        context: The same for asyncio, which asks clients for no certificate.
    """

    contents: tuple[bytes, ...]
    expires_seconds: float
    context: ssl.SSLContext = field(compare=False)


class Certificates:
    """The certificates of TCP ports.

    Args:
        auth: Names the files.
        authorities: PEM file of the authorities that the certificate must be of; None for any.

    Raises:
        ValueError: A file cannot be read, the files do not match, or the certificate is not valid now; the message
            names them.

    Attributes:
        files: The files, with the contents in force.
    """

    def __init__(self, auth: AuthConfig, authorities: Path | None = None) -> None:
        self.files = ReloadedFiles(_paths(auth), lambda: _read(auth, authorities))
        self._path = str(auth.tls_cert)
        self._lock = threading.Lock()
        self._checks_clients = bool(auth.tls_client_ca)

    @property
    def age_seconds(self) -> float:
        """Time since the files were last found to contain the certificates in force."""
        return self.files.age_seconds

    @property
    def expires_seconds(self) -> float:
        """When the server's certificate expires, in seconds since 1970. Those of its authorities are not considered."""
        return self.files.value.expires_seconds

    def new_credentials(self) -> grpc.ServerCredentials:
        """Makes the credentials of one port. Each port needs its own, as gRPC asks each for changes."""
        served = self.files.value

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC at each handshake, in its own threads. None keeps the current configuration."""
            nonlocal served
            self.refresh()
            with self._lock:
                if served == self.files.value:
                    return None
                served = self.files.value
                return _configuration(served.contents)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served.contents),
            changed,  # type: ignore[arg-type]  # grpc documents that None may be returned
            require_client_authentication=self._checks_clients,
        )

    def new_context(self) -> ssl.SSLContext:
        """Makes the context of a port of asyncio. Clients need no certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

        def use_current(connection: ssl.SSLObject, _name: object, _context: object) -> None:
            """Called at each handshake, with or without a server name."""
            self.refresh()
            connection.context = self.files.value.context

        context.sni_callback = use_current
        return context

    def new_link_context(self) -> ssl.SSLContext:
        """As `new_context`, but clients need a certificate where those of gRPC do."""
        context = self.new_context()
        if self._checks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def refresh(self) -> None:
        """Reloads the files if they have changed. May be called in any thread."""
        with self._lock:
            try:
                if self.files.refresh():
                    _log.info("certificates reloaded", extra={"path": self._path})
            except ValueError as error:
                _log.error("certificates not reloaded", extra={"error": str(error)})


def _paths(auth: AuthConfig) -> tuple[Path, ...]:
    return tuple(path for path in (auth.tls_key, auth.tls_cert, auth.tls_client_ca) if path)


def _configuration(contents: tuple[bytes, ...]) -> grpc.ServerCertificateConfiguration:
    key, chain, *client_ca = contents
    return grpc.ssl_server_certificate_configuration([(key, chain)], client_ca[0] if client_ca else None)


def _read(auth: AuthConfig, authorities: Path | None) -> _Certificate:
    paths = _paths(auth)
    try:
        before = tuple(path.read_bytes() for path in paths)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(paths[1], paths[0], password=_no_passphrase)
        if auth.tls_client_ca:
            context.load_verify_locations(auth.tls_client_ca)
        expires_seconds = _check_valid(context, paths[1], authorities)
        if before != tuple(path.read_bytes() for path in paths):
            raise ValueError("tls_cert, tls_key: changed while being read")
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"tls_cert: {paths[1]}: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise ValueError(f"tls_cert, tls_key: not a matching pair, or not PEM: {error.reason or error}") from error
    except OSError as error:
        raise ValueError(f"tls_cert, tls_key: {error.filename}: {error.strerror}") from error
    return _Certificate(before, expires_seconds, context)


def _check_valid(context: ssl.SSLContext, chain: Path, authorities: Path | None) -> float:
    """Checks a certificate as a client does, by a handshake in memory. The standard library has no other way.

    Returns:
        When it expires, in seconds since 1970.

    Raises:
        ssl.SSLCertVerificationError: It is expired, not yet valid, or not of the authorities.
        ValueError: The file of the authorities is invalid.
    """
    verifier = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    verifier.check_hostname = False
    if authorities is None:  # the certificate itself is trusted, so only its dates and purpose can be wrong
        verifier.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        verifier.load_verify_locations(authorities or chain)
    except ssl.SSLError as error:
        raise ValueError(f"{authorities or chain}: has no certificates in PEM format") from error
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = verifier.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server, client):  # TLS 1.2 takes two rounds
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    presented = client.getpeercert() or {}
    return ssl.cert_time_to_seconds(str(presented["notAfter"]))


def _no_passphrase() -> str:
    raise ValueError("tls_key: requires a passphrase, but the server cannot prompt for one")
