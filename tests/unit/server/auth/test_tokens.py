"""The token file, and the permissions of a token."""

import hashlib
from datetime import date
from pathlib import Path

import pytest

from kvpool.server.auth.files import ReloadedFiles
from kvpool.server.auth.tokens import Grant, Role, checked_grant, entry_text, find, new_token, read_tokens

DIGEST = hashlib.sha256(b"secret").hexdigest()
ENTRY = f"[[token]]\nname = 'a'\nrole = 'scheduler'\npools = ['llama*']\nsha256 = '{DIGEST}'\n"


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_is_found_by_its_digest_alone(tmp_path: Path) -> None:
    grants = read_tokens(written(tmp_path, ENTRY))
    found = find(grants, "secret")
    assert found == Grant("a", Role.SCHEDULER, ("llama*",), (bytes.fromhex(DIGEST),))
    assert [find(grants, guess) for guess in ("secreT", "", DIGEST, "\udcff")] == [None] * 4
    assert DIGEST not in repr(found)


@pytest.mark.parametrize(
    ("patterns", "name", "covered"),
    [(["llama*"], "llama-8b", True), (["llama*"], "Llama-8b", False), (["a", "b?"], "b1", True), (["a"], "a1", False)],
)
def test_pools_are_shell_patterns(patterns: list[str], name: str, *, covered: bool) -> None:
    grant = checked_grant("x", {"name": "a", "role": "admin", "pools": patterns, "sha256": DIGEST})
    assert (grant.covers(name), grant.covers_all) == (covered, False)


def test_a_token_is_valid_on_its_last_day() -> None:
    grant = Grant("a", Role.ADMIN, ("*",), (), expires=date(2027, 1, 31))
    assert [grant.is_valid_on(day) for day in (date(2027, 1, 31), date(2027, 2, 1))] == [True, False]


def test_a_new_token_matches_its_entry(tmp_path: Path) -> None:
    token, digest = new_token()
    entry = {"name": "a", "role": "worker", "pools": ["*"], "sha256": digest, "salt": "s" * 16}
    grant = checked_grant("x", {**entry, "expires": date(2027, 1, 1)})
    assert find(read_tokens(written(tmp_path, entry_text(grant))), token) == grant
    assert token not in entry_text(grant)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[token]", "not TOML"),
        ("tokens = 1", "needs at most"),
        ("token = [1]", r"entry 1: needs \[\[token\]\]"),
        (ENTRY + "rolle = 'x'", "entry 1: unknown key 'rolle'"),
        (ENTRY.replace("'a'", "'a b'"), "entry 1: name: needs"),
        (ENTRY.replace("scheduler", "root"), "role: needs one of scheduler, worker, watcher, admin"),
        (ENTRY.replace("['llama*']", "[]"), "pools: needs a string or"),
        (ENTRY.replace(DIGEST, "secret"), "sha256: needs 64"),
        (ENTRY + "salt = 'short'", "salt: needs at least 16 bytes"),
        (ENTRY + "salt = ''", "salt: needs at least 16 bytes"),
        (ENTRY + "expires = '2027-01-01'", "expires: needs a date"),
        (ENTRY + ENTRY, "name: 'a' appears twice"),
        (ENTRY + ENTRY.replace("'a'", "'b'"), f"sha256: '{DIGEST}' appears twice"),
    ],
)
def test_errors_of_the_file_are_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_tokens(written(tmp_path, text))


@pytest.mark.parametrize("mode", [0o604, 0o602])
def test_a_file_that_all_users_can_access_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match="is accessible to all users"):
        read_tokens(written(tmp_path, ENTRY, mode))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_tokens(tmp_path / "none")


def test_a_changed_file_is_reloaded_and_an_invalid_one_reported_once(tmp_path: Path) -> None:
    path = written(tmp_path, ENTRY)
    file = ReloadedFiles((path,), lambda: read_tokens(path))
    first = file.value
    assert not file.refresh()
    path.write_text("[[broken")
    with pytest.raises(ValueError, match="not TOML"):
        file.refresh()
    assert (file.refresh(), file.value) == (False, first)
    path.write_text(ENTRY.replace("'a'", "'other'"))
    assert (file.refresh(), file.value[0].name) == (True, "other")
    path.unlink()
    with pytest.raises(ValueError, match="No such file"):
        file.refresh()
    assert file.value[0].name == "other"
