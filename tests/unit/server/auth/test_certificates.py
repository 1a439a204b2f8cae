"""Which certificates a server takes, when it starts and when they change."""

import logging
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from kvpool.server.auth.certificates import Certificates
from kvpool.server.auth.config import AuthConfig
from support.auth import Authority, Pair


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "theirs")


def replace(used: Pair, pair: Pair) -> None:
    pair.key.replace(used.key)
    pair.cert.replace(used.cert)


@pytest.mark.parametrize("dates", [{"days": -1.0}, {"begin_days": 0.5}])
def test_a_certificate_that_is_not_valid_now_is_refused(authority: Authority, dates: dict[str, float]) -> None:
    pair = authority.issue("a", **dates)
    for authorities in (None, authority.path):
        with pytest.raises(ValueError, match=f"^tls_cert: {pair.cert}: certificate (has expired|is not yet valid)$"):
            Certificates(AuthConfig(pair.cert, pair.key), authorities)


def test_a_refused_certificate_replaces_none(
    authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpool.server.auth")
    used, valid = authority.issue("a"), authority.issue("b")
    invalid = authority.issue("a", days=-1), authority.issue("a", begin_days=0.5), stranger.issue("a")
    certificates = Certificates(AuthConfig(used.cert, used.key), authority.path)
    before = certificates.files.value
    for refused in invalid:
        replace(used, refused)
        certificates.files._tried_seconds = 0.0  # files are read again every second
        certificates.refresh()
        assert certificates.files.value is before
    replace(used, valid)
    certificates.files._tried_seconds = 0.0
    certificates.refresh()
    assert certificates.files.value is not before
    errors = [str(getattr(record, "error", "")).rpartition(": ")[2] for record in caplog.records]
    assert errors == [
        "certificate has expired",
        "certificate is not yet valid",
        "unable to get local issuer certificate",
        "",
    ]
    assert caplog.records[-1].message == "certificates reloaded"


def test_any_authority_will_do_if_none_is_configured(authority: Authority, stranger: Authority) -> None:
    used, other = authority.issue("a"), stranger.issue("a")
    certificates = Certificates(AuthConfig(used.cert, used.key))
    before = certificates.files.value
    replace(used, other)
    certificates.refresh()
    assert certificates.files.value is not before


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_expiry_is_that_of_the_certificate_in_force(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, version: ssl.TLSVersion
) -> None:
    wrap = ssl.SSLContext.wrap_bio

    def limited(context: ssl.SSLContext, *arguments: Any, **options: Any) -> ssl.SSLObject:
        context.maximum_version = version
        return wrap(context, *arguments, **options)

    monkeypatch.setattr(ssl.SSLContext, "wrap_bio", limited)
    used, later = authority.issue("a", days=1), authority.issue("a", days=20)
    certificates = Certificates(AuthConfig(used.cert, used.key))
    assert 0.99 < (certificates.expires_seconds - time.time()) / 86_400 <= 1
    replace(used, later)
    certificates.refresh()
    assert 19.99 < (certificates.expires_seconds - time.time()) / 86_400 <= 20


def test_a_file_of_authorities_without_certificates_is_named(authority: Authority) -> None:
    pair = authority.issue("a")
    with pytest.raises(ValueError, match=f"^{pair.key}: has no certificates in PEM format$"):
        Certificates(AuthConfig(pair.cert, pair.key), pair.key)
