"""Credentials of a client, and to which servers it sends them."""

import re
from pathlib import Path

import pytest
import trustme

from kvpool.client import connect
from kvpool.wire.channels import ClientCredentials, TlsConfig

REMOTE = ["10.0.0.7:1", "server:1", "localhost.example:1"]


@pytest.mark.parametrize("address", REMOTE)
def test_a_token_is_not_sent_in_plaintext_beyond_loopback(address: str) -> None:
    with pytest.raises(ValueError, match=r"^token: .* others could read the token"):
        connect(address, token="secret")  # noqa: S106 - a test's
    connect(address, token="secret", allow_plaintext=True).close()  # noqa: S106 - likewise
    connect(address, token="secret", tls=TlsConfig()).close()  # noqa: S106 - likewise
    connect(address).close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/s"])
def test_a_token_is_sent_over_loopback(address: str) -> None:
    ClientCredentials(token="secret").check(address)  # noqa: S106 - a test's


def test_defaults_come_from_the_environment(tmp_path: Path) -> None:
    environment = {
        "KVPOOL_TLS_CA": "ca",
        "KVPOOL_TLS_CERT": "cert",
        "KVPOOL_TLS_KEY": "key",
        "KVPOOL_TLS_SERVER_NAME": "name",
        "KVPOOL_TOKEN": "secret",
    }
    tls = TlsConfig(Path("ca"), Path("cert"), Path("key"), "name")
    found = ClientCredentials.of(None, None, allow_plaintext=False, environment=environment)
    assert found == ClientCredentials(tls, "secret")
    assert "secret" not in repr(found)
    file = {**environment, "KVPOOL_TOKEN_FILE": str(tmp_path)}
    assert ClientCredentials.of(None, None, allow_plaintext=False, environment=file).token == tmp_path
    mine = ClientCredentials.of(TlsConfig(), "mine", allow_plaintext=True, environment=file)
    assert mine == ClientCredentials(TlsConfig(), "mine", allow_plaintext=True)


@pytest.mark.parametrize("text", ["", "two words", "line\nline", "dör"])
def test_invalid_tokens_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^token: needs one line"):
        ClientCredentials(token=path).check("unix:/s")


def test_a_file_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    key, certificate, text = (tmp_path / name for name in ("key", "certificate", "text"))
    authority = trustme.CA()
    authority.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(certificate)
    text.write_text("nothing")
    TlsConfig(certificate, certificate, key).credentials()
    for config, message in (
        (TlsConfig(key), f"tls_ca: {key}: needs a certificate, and the file holds a private key"),
        (TlsConfig(text), f"tls_ca: {text}: needs a certificate, and the file holds no PEM data of one"),
        (TlsConfig(None, key, key), f"tls_cert: {key}: needs a certificate, and the file holds a private key"),
        (
            TlsConfig(None, certificate, certificate),
            f"tls_key: {certificate}: needs a private key, and the file holds a",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            config.credentials()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^token_file: .*none: No such file"):
        ClientCredentials(token=tmp_path / "none").check("unix:/s")
    with pytest.raises(ValueError, match=r"^tls_ca: .*none: No such file"):
        ClientCredentials(TlsConfig(tmp_path / "none")).check("server:1")
    with pytest.raises(ValueError, match=r"^tls_cert, tls_key: each requires the other"):
        TlsConfig(cert=tmp_path)
