"""Server certificates: read, validated, and reloaded while the server runs.

1. An unreadable or mismatched pair of files never replaces a valid one.
2. Open connections keep their certificate. Each new connection gets the current one.
"""

import logging
import ssl
import threading
from pathlib import Path

import grpc

from kvpool.server.auth.config import AuthConfig
from kvpool.server.auth.files import ReloadedFiles

_log = logging.getLogger("kvpool.server.auth")


def server_credentials(auth: AuthConfig) -> grpc.ServerCredentials | None:
    """Makes the credentials of TCP ports; None for plaintext.

    Raises:
        ValueError: A file cannot be read, or the files do not match; the message names them.
    """
    if auth.tls_cert is None or auth.tls_key is None:
        return None
    files = ReloadedFiles(_paths(auth), lambda: _read(auth))
    lock = threading.Lock()

    def current() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at each handshake, in its own threads. None keeps the current configuration."""
        with lock:
            try:
                if not files.refresh():
                    return None
            except ValueError as error:
                _log.error("certificates not reloaded", extra={"error": str(error)})
                return None
            _log.info("certificates reloaded", extra={"path": str(auth.tls_cert)})
            return _configuration(files.value)

    first = _configuration(files.value)
    return grpc.dynamic_ssl_server_credentials(
        first,
        current,  # type: ignore[arg-type]  # grpc documents that None may be returned
        require_client_authentication=bool(auth.tls_client_ca),
    )


def _paths(auth: AuthConfig) -> tuple[Path, ...]:
    return tuple(path for path in (auth.tls_key, auth.tls_cert, auth.tls_client_ca) if path)


def _configuration(contents: tuple[bytes, ...]) -> grpc.ServerCertificateConfiguration:
    key, chain, *client_ca = contents
    return grpc.ssl_server_certificate_configuration([(key, chain)], client_ca[0] if client_ca else None)


def _read(auth: AuthConfig) -> tuple[bytes, ...]:
    """Returns the key, the certificate chain and, if configured, the authorities for client certificates."""
    paths = _paths(auth)
    try:
        before = tuple(path.read_bytes() for path in paths)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(paths[1], paths[0], password=_no_passphrase)
        if auth.tls_client_ca:
            context.load_verify_locations(auth.tls_client_ca)
        if before != tuple(path.read_bytes() for path in paths):
            raise ValueError("tls_cert, tls_key: changed while being read")
    except ssl.SSLError as error:
        raise ValueError(f"tls_cert, tls_key: not a matching pair, or not PEM: {error.reason or error}") from error
    except OSError as error:
        raise ValueError(f"tls_cert, tls_key: {error.filename}: {error.strerror}") from error
    return before


def _no_passphrase() -> str:
    raise ValueError("tls_key: requires a passphrase, but the server cannot prompt for one")
