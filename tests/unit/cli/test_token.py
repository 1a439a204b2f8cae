"""What `kvpool token new` refuses; what it makes is tried by docs/how-to/secure.md's commands."""

import pytest
from click.testing import CliRunner

from kvpool.cli.token import token

ASKED = ["new", "--name", "a", "--role", "scheduler", "--pool", "*"]


@pytest.mark.parametrize("salt", ["", "short", "a quote ' within it"])
def test_a_salt_that_sets_nobody_apart_makes_no_token(salt: str) -> None:
    """An empty one is what a shell makes of a variable that is not set."""
    result = CliRunner().invoke(token, [*ASKED, "--salt", salt])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "salt: needs at least 16 bytes" in result.stderr


def test_two_salts_are_one_too_many() -> None:
    result = CliRunner().invoke(token, [*ASKED, "--salt", "s" * 16, "--new-salt"])
    assert (result.exit_code, "give one of them" in result.stderr) == (2, True)
