"""The list of commands: complete, and cheap to show."""

import subprocess
import sys

import click
import pytest

from kvpool.cli import main
from support.command import kvpool
from support.waiting import DEADLINE_SECONDS


def commands() -> list[str]:
    return main.list_commands(click.Context(main))


def test_the_help_fits_a_screen_and_shows_each_command_once() -> None:
    lines = kvpool("--help", COLUMNS="80").stdout.splitlines()
    assert len(lines) < 24  # the next prompt takes a line
    assert max(map(len, lines)) <= 80
    assert sorted(word for line in lines[2:] for word in line.split()[:2] if word in commands()) == commands()


@pytest.mark.parametrize("group", ["shard", "token"])
def test_no_summary_of_a_group_is_cut(group: str) -> None:
    assert "..." not in kvpool(group, "--help", COLUMNS="80").stdout.partition("Commands:")[2]


@pytest.mark.parametrize("name", commands())
def test_each_command_exists(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["polls"]])
def test_the_group_imports_no_command(arguments: list[str]) -> None:
    program = (
        "import sys, kvpool.cli\n"
        f"kvpool.cli.main({arguments!r}, standalone_mode=False, obj=None) if {arguments != ['polls']} else None\n"
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in ('kvpool', 'grpc', 'rich')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert set(loaded) <= {
        *("kvpool", "kvpool.cli", "kvpool.cli.options", "kvpool.core", "kvpool.core.errors", "kvpool.replay"),
    }


def test_an_unknown_command_gets_a_close_match() -> None:
    done = kvpool("polls")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "Error: No such command 'polls'; did you mean pools?")
    assert "known: blocks, demo, " in kvpool("xyz").stderr
