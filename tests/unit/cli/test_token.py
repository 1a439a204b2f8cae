"""What `kvpool token new` refuses; what it makes is tried by docs/how-to/secure.md's commands."""

import pytest
from click.testing import CliRunner

from kvpool.cli.token import token

ASKED = ["new", "--name", "a", "--role", "scheduler", "--pool", "*"]


@pytest.mark.parametrize("salt", ["", "short", "a quote ' within it"])
def test_a_short_salt_is_refused(salt: str) -> None:
    """An empty one is what a shell makes of a variable that is not set."""
    result = CliRunner().invoke(token, [*ASKED, "--salt", salt])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: --salt: needs at least 16 bytes" in result.stderr


def test_salt_and_new_salt_exclude_each_other() -> None:
    result = CliRunner().invoke(token, [*ASKED, "--salt", "s" * 16, "--new-salt"])
    assert (result.exit_code, "exclude each other" in result.stderr) == (2, True)
