"""The token file, and the permissions of a token."""

import errno
import hashlib
import os
import traceback
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path

import pytest

from kvpool.server.auth import token_file
from kvpool.server.auth.files import ReloadedFiles
from kvpool.server.auth.tokens import Grant, Role, checked_grant, entry_text, find, new_token, read_tokens
from support.open_files import no_free_files

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


def test_the_next_expiry_is_that_of_the_first_valid_token(tmp_path: Path) -> None:
    today = datetime.now(UTC).date()
    entries = [ENTRY]  # it has no end
    for days in (5, 2, -1):  # the last has expired
        expires = (today + timedelta(days)).isoformat()
        digest = hashlib.sha256(expires.encode()).hexdigest()
        entries.append(ENTRY.replace("'a'", f"'{expires}'").replace(DIGEST, digest) + f"expires = {expires}\n")
    end = datetime.combine(today + timedelta(3), time(), UTC)
    assert token_file.TokenFile(written(tmp_path, "".join(entries))).expires_seconds == end.timestamp()
    assert token_file.TokenFile(written(tmp_path, ENTRY)).expires_seconds is None


def test_a_new_token_matches_its_entry(tmp_path: Path) -> None:
    token, digest = new_token()
    entry = {"name": "a", "role": "worker", "pools": ["*"], "sha256": digest, "salt": "s" * 16}
    grant = checked_grant("x", {**entry, "expires": date(2027, 1, 1)})
    assert find(read_tokens(written(tmp_path, entry_text(grant))), token) == grant
    assert token not in entry_text(grant)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[token]", "not TOML, at line 1, column 8"),
        ("tokens = 1", "needs at most"),
        ("token = [1]", r"entry 1: needs \[\[token\]\]"),
        (ENTRY + "rolle = 'x'", "entry 1: key 5 of the entry is unknown; the keys are name, sha256, role, pools, salt"),
        (ENTRY.replace("'a'", "'a b'"), "entry 1: name: needs"),
        (ENTRY.replace("scheduler", "root"), "role: needs one of scheduler, worker, watcher, admin"),
        (ENTRY.replace("['llama*']", "[]"), "pools: needs a string or"),
        (ENTRY.replace(DIGEST, "secret"), "sha256: needs 64"),
        (ENTRY + "salt = 'short'", "salt: needs at least 16 bytes"),
        (ENTRY + "salt = ''", "salt: needs at least 16 bytes"),
        (ENTRY + "expires = '2027-01-01'", "expires: needs a date"),
        (ENTRY + ENTRY, "name: 'a' appears twice"),
        (ENTRY + ENTRY.replace("'a'", "'b'"), "sha256: one of 'a' appears twice"),
    ],
)
def test_errors_of_the_file_are_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_tokens(written(tmp_path, text))


MISPLACED = "kvp_Vg9aJ2q-Zx81nT"
"""A token in place of what belongs there."""


@pytest.mark.parametrize(
    "text",
    [
        f"{MISPLACED} = 1",
        f"{ENTRY}{MISPLACED} = '{MISPLACED}'",
        f"{ENTRY}{MISPLACED}",
        f"{ENTRY}[{MISPLACED}]\n[{MISPLACED}]",
        f"{ENTRY}x = {{ {MISPLACED} = 1, {MISPLACED} = 2 }}",
        f"{ENTRY}[[{MISPLACED}]]",
        f"{ENTRY}{MISPLACED} = 1\n[{MISPLACED}.x]",
        ENTRY.replace("'a'", f"'{MISPLACED} '"),
        ENTRY.replace("'scheduler'", f"'{MISPLACED}'"),
        ENTRY.replace("['llama*']", f'["{MISPLACED}\'"]'),
        ENTRY.replace(DIGEST, MISPLACED),
        f'{ENTRY}salt = "{MISPLACED}\'{MISPLACED}"',
        f"{ENTRY}expires = '{MISPLACED}'",
    ],
)
def test_errors_of_the_file_quote_no_secret(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"^tokens: ") as caught:
        read_tokens(written(tmp_path, text))
    assert MISPLACED not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("mode", [0o604, 0o602])
def test_a_file_that_all_users_can_access_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match="is accessible to all users"):
        read_tokens(written(tmp_path, ENTRY, mode))


class TokenFile:
    """A token file, and its copy in a server, at a time that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.path = written(folder, ENTRY)
        self.now_seconds = 1000.0
        self._set_time()
        self.file = ReloadedFiles((self.path,), lambda: read_tokens(self.path), lambda: self.now_seconds)

    def write(self, text: str) -> None:
        """Writes the file in place."""
        self.path.write_text(text)
        self._set_time()

    def replace(self, text: str) -> None:
        """Replaces the file by renaming."""
        fresh = self.path.with_suffix(".new")
        fresh.touch(0o600)
        fresh.write_text(text)
        fresh.replace(self.path)
        self._set_time()

    def _set_time(self) -> None:
        os.utime(self.path, (self.now_seconds, self.now_seconds))

    @property
    def names(self) -> list[str]:
        return [grant.name for grant in self.file.value]


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path)


OTHER = ENTRY.replace("'a'", "'other'")


def test_a_renamed_file_is_read_at_once(tokens: TokenFile) -> None:
    assert not tokens.file.refresh()
    tokens.replace(OTHER)
    assert (tokens.file.refresh(), tokens.names, tokens.file.refresh()) == (True, ["other"], False)


def test_a_file_written_in_place_is_read_when_its_writer_has_paused(tokens: TokenFile) -> None:
    two = ENTRY + OTHER.replace(DIGEST, "f" * 64)
    tokens.write(two)
    tokens.now_seconds += 2
    assert (tokens.file.refresh(), tokens.names) == (True, ["a", "other"])
    for text in ("", ENTRY, two.replace("other", "third")):  # truncated, half written, written
        tokens.write(text)
        tokens.now_seconds += 0.9
        assert (tokens.file.refresh(), tokens.names) == (False, ["a", "other"])
    tokens.now_seconds += 0.2
    assert (tokens.file.refresh(), tokens.names) == (True, ["a", "third"])


@pytest.mark.parametrize(("text", "words"), [("[[broken", "not TOML"), ("", "has no .* entries")])
def test_an_invalid_file_changes_nothing_and_is_reported_once(tokens: TokenFile, text: str, words: str) -> None:
    tokens.replace(text)
    with pytest.raises(ValueError, match=words):
        tokens.file.refresh()
    for _ in range(3):
        tokens.now_seconds += 2
        assert (tokens.file.refresh(), tokens.names) == (False, ["a"])
    tokens.replace(OTHER)
    tokens.now_seconds += 2  # the new file can have the inode of the first one
    assert (tokens.file.refresh(), tokens.names) == (True, ["other"])
    tokens.path.unlink()
    tokens.now_seconds += 2
    with pytest.raises(ValueError, match="No such file"):
        tokens.file.refresh()
    assert tokens.names == ["other"]


def test_a_file_that_cannot_be_read_for_a_while_is_read_later(
    tokens: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    tokens.replace(OTHER)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        with pytest.raises(ValueError, match="Too many open files"):
            tokens.file.refresh()
        tokens.now_seconds += 2
        assert (tokens.file.refresh(), tokens.names, tokens.file.age_seconds) == (False, ["a"], 2)
    assert not tokens.file.refresh()  # one attempt per second
    tokens.now_seconds += 2
    assert (tokens.file.refresh(), tokens.names, tokens.file.age_seconds) == (True, ["other"], 0)


def test_a_process_without_descriptors_reads_changed_files(tokens: TokenFile) -> None:
    tokens.replace(OTHER)
    with no_free_files():
        assert (tokens.file.refresh(), tokens.names) == (True, ["other"])
