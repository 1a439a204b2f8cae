"""URLs and settings of the directory in etcd."""

from pathlib import Path

import pytest

from kvpool.server.cluster.etcd_config import EtcdConfig
from kvpool.wire.channels import TlsConfig


def test_a_url_names_endpoints_and_the_shard() -> None:
    assert EtcdConfig.parse("etcd://a:2379,[::1]:2379/prod.1_x-y") == EtcdConfig(("a:2379", "[::1]:2379"), "prod.1_x-y")


@pytest.mark.parametrize("url", ["etcd://a:2379", "etcd://a:2379/"])
def test_the_shard_can_be_left_out(url: str) -> None:
    config = EtcdConfig.parse(url)
    assert (config.endpoints, config.shard) == (("a:2379",), "main")
    assert config.key == b"/kvpool/main"


def test_the_scheme_or_settings_turn_tls_on() -> None:
    ours = TlsConfig(Path("ca.pem"))
    assert EtcdConfig.parse("etcd://a:2379").tls is None
    assert EtcdConfig.parse("etcds://a:2379").tls == TlsConfig()
    assert EtcdConfig.parse("etcds://a:2379", ours).tls == ours
    assert EtcdConfig.parse("etcd://a:2379", ours).tls == ours


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a:2379",
        "http://a:2379",
        "etcd://",
        "etcd:///x",
        "etcd://a",
        "etcd://a:2379,",
        "etcd://a:2379,b",
        "etcd://a:99999",
        "etcd://a:2379,a:2379",
        "etcd://user:word@a:2379",
        "etcd://a:2379/x/y",
        "etcd://a:2379/x y",
        "etcd://a:2379/" + "x" * 65,
        "etcd://a:2379/x?y=1",
        "etcd://a:2379/x#y",
        "etcd://a:2379/x\n",
    ],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"^cluster: "):
        EtcdConfig.parse(url)


def test_a_password_in_the_url_is_not_quoted() -> None:
    with pytest.raises(ValueError, match=r"^cluster: .*etcd_password_file$"):
        EtcdConfig.parse("etcd://user:secret@a:2379")


def test_user_and_password_file_require_each_other() -> None:
    with pytest.raises(ValueError, match=r"^cluster: .*password file"):
        EtcdConfig.parse("etcd://a:2379", user="u")
    with pytest.raises(ValueError, match=r"^cluster: .*password file"):
        EtcdConfig.parse("etcd://a:2379", password_file=Path("p"))


def test_a_password_is_sent_over_tls_or_loopback_alone() -> None:
    with pytest.raises(ValueError, match=r"^cluster: a user of etcd needs TLS"):
        EtcdConfig.parse("etcd://127.0.0.1:2379,a:2379", user="u", password_file=Path("p"))
    assert EtcdConfig.parse("etcds://a:2379", user="u", password_file=Path("p")).user == "u"
    assert EtcdConfig.parse("etcd://127.0.0.1:2379", user="u", password_file=Path("p")).user == "u"
