"""Errors name options as the user wrote them."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvpool.cli.options import as_given, did_you_mean
from kvpool.cli.settings import config_option


def said(message: str, *arguments: str, **environment: str) -> str:
    """Returns the error of a command that fails with this message."""

    @click.command(context_settings={"auto_envvar_prefix": "KVPOOL_SAY"})
    @config_option
    @click.argument("number", required=False)
    @click.option("--grace-seconds")
    @click.option("-l", "--listen")
    @click.option("--tls-cert", envvar="KVPOOL_TLS_CERT")
    @click.option("--tls-key", envvar="KVPOOL_TLS_KEY")
    def say(**_: object) -> None:
        click.echo(as_given(message))

    done = CliRunner(env=environment).invoke(say, [*arguments], catch_exceptions=False)
    return done.output.strip()


def test_a_name_is_replaced_by_the_flag_the_variable_or_the_key(tmp_path: Path) -> None:
    message = "grace_seconds: -1 is not in [0, 1]"
    assert said(message) == said(message, "--grace-seconds", "-1") == "--grace-seconds: -1 is not in [0, 1]"
    assert said(message, KVPOOL_SAY_GRACE_SECONDS="-1") == "KVPOOL_SAY_GRACE_SECONDS: -1 is not in [0, 1]"
    (tmp_path / "f.toml").write_text("grace_seconds = -1")
    assert said(message, "--config", str(tmp_path / "f.toml")) == message


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("listen: needs tls_cert", "--listen: needs --tls-cert"),
        ("tls_cert, tls_key: each requires the other", "--tls-cert, --tls-key: each requires the other"),
        ("number: is too large", "NUMBER: is too large"),
        ("tls_cert: /etc/tls_key/tls_cert.pem: No such file", "--tls-cert: /etc/tls_key/tls_cert.pem: No such file"),
        ("listen: 'tls_key': needs host:port", "--listen: 'tls_key': needs host:port"),
        ("no_option: listen: x", "no_option: listen: x"),
        ("listen is no field here", "listen is no field here"),
    ],
)
def test_what_is_no_name_stays(message: str, shown: str) -> None:
    assert said(message) == shown


def test_an_own_variable_is_named() -> None:
    assert said("tls_cert: x", KVPOOL_TLS_CERT="y") == "KVPOOL_TLS_CERT: x"


def test_without_a_command_nothing_is_replaced() -> None:
    assert as_given("grace_seconds: x") == "grace_seconds: x"


def test_hints_are_short() -> None:
    assert did_you_mean("lama", ["llama", "qwen"]) == "did you mean llama?"
    assert did_you_mean("x", ["b", "a"]) == "known: a, b"
    assert did_you_mean("x", []) == ""
    assert did_you_mean("x", [f"p{i:02}" for i in range(99)]).endswith("p28, p29, ...")
