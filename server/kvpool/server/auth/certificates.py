"""A server's certificates: read, checked, and exchanged while it runs.

1. A pair of files that does not fit, or cannot be read, never takes the place of one that does.
2. Connections that stand keep what they were made with; each new one gets what the files say then.
"""

import logging
import ssl
import threading
from pathlib import Path

import grpc

from kvpool.server.auth.config import AuthConfig
from kvpool.server.auth.files import Reloaded

_log = logging.getLogger("kvpool.server.auth")


def server_credentials(auth: AuthConfig) -> grpc.ServerCredentials | None:
    """Makes what a TCP port listens with; None for plaintext.

    Raises:
        ValueError: A file cannot be read, or they do not belong together; names them.
    """
    if auth.tls_cert is None or auth.tls_key is None:
        return None
    files = Reloaded(_paths(auth), lambda: _read(auth))
    lock = threading.Lock()

    def current() -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC at each handshake, in threads of its own; None keeps what there is."""
        with lock:
            try:
                if not files.refresh():
                    return None
            except ValueError as error:
                _log.error("certificates not taken", extra={"error": str(error)})
                return None
            _log.info("certificates exchanged", extra={"path": str(auth.tls_cert)})
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
    """Returns key, certificates and, if asked for, the clients' authorities."""
    paths = _paths(auth)
    try:
        before = tuple(path.read_bytes() for path in paths)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(paths[1], paths[0], password=_no_passphrase)
        if auth.tls_client_ca:
            context.load_verify_locations(auth.tls_client_ca)
        if before != tuple(path.read_bytes() for path in paths):
            raise ValueError("tls_cert, tls_key: they change while they are read")
    except ssl.SSLError as error:
        raise ValueError(f"tls_cert, tls_key: no pair, or not PEM: {error.reason or error}") from error
    except OSError as error:
        raise ValueError(f"tls_cert, tls_key: {error.filename}: {error.strerror}") from error
    return before


def _no_passphrase() -> str:
    raise ValueError("tls_key: is locked by a passphrase; the server can ask nobody")
