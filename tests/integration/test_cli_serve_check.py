"""`kvpool serve --check`: settings and files are checked, and nothing starts."""

import os
from pathlib import Path

import pytest

from support.auth import Authority, write_tokens
from support.command import kvpool
from support.server import CommandLineServer


def check(*arguments: object, **variables: str) -> tuple[int, str, str]:
    done = kvpool("serve", "--check", *arguments, **variables)
    return done.returncode, done.stdout, done.stderr


def test_valid_settings_start_and_change_nothing(tmp_path: Path) -> None:
    pair = Authority(tmp_path, "ca").issue("localhost")
    tokens = tmp_path / "tokens.toml"
    write_tokens(tokens, [{"name": "a", "role": "scheduler", "pools": ["*"]}])
    path = tmp_path / "serve.toml"
    path.write_text(f'tokens = "{tokens}"\njournal = "{tmp_path}/new/journal"\nlisten = "unix:{tmp_path}/s"\n')
    arguments = ("--config", path, "--tls-cert", pair.cert, "--tls-key", pair.key)
    before = sorted(tmp_path.iterdir())
    assert check(*arguments) == (0, "the settings are valid\n", "")
    assert sorted(tmp_path.iterdir()) == before


def test_the_settings_of_a_running_server_can_be_checked(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    options = ("--journal", f"{tmp_path}/journal")
    with CommandLineServer(address, options=options):
        assert check("--listen", address, *options)[0] == 0


def test_every_wrong_file_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tokens = tmp_path / "tokens.toml"
    write_tokens(tokens, [{"name": "a", "role": "nobody", "pools": ["*"]}])
    status, out, err = check(
        *("--listen", f"unix:{tmp_path}/s", "--tokens", tokens, "--journal", tmp_path / "file" / "journal"),
        *("--tls-cert", tmp_path / "no.pem", "--tls-key", tmp_path / "file"),
    )
    assert (status, out) == (1, "")
    lines = err.splitlines()
    assert [line.split(":")[:2] for line in lines] == [
        ["Error", " --tls-cert, --tls-key"],
        ["Error", " --tokens"],
        ["Error", " --journal"],
    ]
    assert "entry 1" in lines[1]
    assert lines[2].startswith(f"Error: --journal: {tmp_path}/file: is not a folder; ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    status, _, err = check("--listen", "unix:/tmp/s", "--journal", tmp_path)
    tmp_path.chmod(0o700)
    words = f"Error: --journal: {tmp_path}: cannot be read and written by this user; "
    assert (status, err.startswith(words)) == (1, True), err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max_pool = 3\n", "unknown key max_pool; did you mean max_pools?"),
        ("[table]\nx = 1\n", "unknown key table"),
        ("not toml\n", "not TOML"),
        ("grace_seconds = [1]\n", "takes one value"),
        ("listen = 'nowhere'\n", "listen: address 'nowhere': needs host:port or unix:/path"),
        ("steps_listen = ['s']\n", "steps_listen: address 's': needs host:port or unix:/path"),
        ("max_pools = 0\n", "max_pools: 0 is not in [1, 1048576]"),
        ("check = true\n", "unknown key check"),
        ("metrics_listen = '9464'\n", "metrics_listen: address '9464': needs host:port"),
        ("block_sample_rate = 1.5\n", "block_sample_rate: 1.5 is not in [0, 1]"),
        (
            "otlp_traces_endpoint = 'collector:4317'\n",
            "otlp_traces_endpoint: 'collector:4317': needs http://HOST:PORT",
        ),
        ("trace_slow_seconds = -1.0\n", "trace_slow_seconds: -1.0 is not in [0, 3600]"),
    ],
)
def test_a_wrong_option_is_named(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(content)
    status, _, err = check("--config", path)
    assert status == 2
    assert words in err


def test_the_environment_cannot_ask_for_a_check() -> None:
    status, _, err = check(KVPOOL_SERVE_CHECK="1")
    assert (status, "unknown key KVPOOL_SERVE_CHECK" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--advertise", f"{'a' * 300}:1"], "--advertise: longer than 260 bytes"),
        ([f"--advertise={'a' * 40}{number}:1" for number in range(10)], "--advertise: the server takes "),
        (["--advertise", "0.0.0.0:1"], "--advertise: 0.0.0.0:1 does not say "),
    ],
)
def test_addresses_that_a_shard_cannot_use_are_named(tmp_path: Path, options: list[str], words: str) -> None:
    listen = ("--listen", "127.0.0.1:1", "--replication-listen", "127.0.0.1:2", "--journal", tmp_path / "journal")
    status, out, err = check(*listen, "--cluster", "etcd://h:1/c", *options)
    assert (status, out) == (1, "")
    assert err.startswith(f"Error: {words}")
    assert not list(tmp_path.iterdir())
