"""What a server remembers of its shard."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.server.cluster.directory import MemberId, Seen
from kvpool.server.cluster.identity import Identity, IdentityFile, read_identity, write_identity


def test_a_new_server_has_a_random_id_that_outlives_it(tmp_path: Path) -> None:
    first = IdentityFile(tmp_path, "main").identity
    assert (first.shard, first.known_term) == ("main", 0)
    assert IdentityFile(tmp_path, "main").identity == first
    (tmp_path / "other").mkdir()
    assert IdentityFile(tmp_path / "other", "main").identity.member_id != first.member_id


def test_the_highest_term_is_remembered(tmp_path: Path) -> None:
    file = IdentityFile(tmp_path, "main")
    for term in (3, 7, 5):
        file.keep(Seen(term, 10 * term))
    assert file.identity.known_term == 7
    assert IdentityFile(tmp_path, "main").identity == file.identity


def test_a_term_is_written_when_it_changes_only(tmp_path: Path) -> None:
    file = IdentityFile(tmp_path, "main")
    file.keep(Seen(3, 30))
    (tmp_path / "member").unlink()
    file.keep(Seen(3, 30))
    assert not (tmp_path / "member").exists()
    file.keep(Seen(4, 40))
    assert (tmp_path / "member").exists()


def test_a_term_that_cannot_be_written_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    file = IdentityFile(folder, "main")
    folder.rename(tmp_path / "moved")
    for term in (3, 3, 4):
        file.keep(Seen(term, 10 * term))
    assert file.identity.known_term == 4
    assert [(record.message, record.__dict__["term"]) for record in caplog.records] == [("record not kept", 3)]
    (tmp_path / "moved").rename(folder)
    file.keep(Seen(3, 30))
    assert IdentityFile(folder, "main").identity == file.identity


def test_an_identity_is_written_and_read(tmp_path: Path) -> None:
    assert read_identity(tmp_path) is None
    identity = Identity("main", MemberId("m"), 5)
    write_identity(tmp_path, identity)
    assert (tmp_path / "member").stat().st_mode & 0o777 == 0o600
    assert read_identity(tmp_path) == identity == IdentityFile(tmp_path, "main").identity


def _copy_back(folder: Path, copy: Path) -> None:
    shutil.copytree(folder, copy)
    (copy / "member").rename(folder / "member")


@pytest.mark.parametrize("way", [shutil.copytree, _copy_back])
def test_a_copy_is_another_server(
    tmp_path: Path, way: Callable[[Path, Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    folder, copy = tmp_path / "journal", tmp_path / "copy"
    folder.mkdir()
    file = IdentityFile(folder, "main")
    file.keep(Seen(3, 30))
    way(folder, copy)
    copied = folder if way is _copy_back else copy
    found = IdentityFile(copied, "main").identity
    assert found.member_id != file.identity.member_id
    assert found.known_term == 3
    assert caplog.messages == ["identity was copied"]
    assert IdentityFile(copied, "main").identity == found == read_identity(copied)
    assert len(caplog.messages) == 1


def test_a_folder_that_was_moved_keeps_its_identity(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    identity = IdentityFile(folder, "main").identity
    (folder / "member").chmod(0o640)
    folder.rename(tmp_path / "moved")
    assert IdentityFile(tmp_path / "moved", "main").identity == identity


def test_the_journal_of_another_shard_is_refused(tmp_path: Path) -> None:
    IdentityFile(tmp_path, "main")
    with pytest.raises(OSError, match="belongs to shard main, this server to other"):
        IdentityFile(tmp_path, "other")


GOOD = {"shard": "main", "member_id": "m", "known_term": 1, "known_revision": 5, "file_id": "1-1"}


@pytest.mark.parametrize(
    "content",
    [
        "\udcff",  # no UTF-8
        "",
        "{",
        "[]",
        "null",
        "7",
        "{}",
        json.dumps({**GOOD, "more": 1}),
        json.dumps({name: value for name, value in GOOD.items() if name != "file_id"}),
        json.dumps({**GOOD, "known_term": "1"}),
        json.dumps({**GOOD, "known_term": True}),
        json.dumps({**GOOD, "known_revision": "5"}),
        json.dumps({**GOOD, "member_id": None}),
        json.dumps({**GOOD, "file_id": 7}),
        json.dumps({**GOOD, "shard": ""}),
        json.dumps({**GOOD, "shard": "ma\n"}),
        json.dumps({**GOOD, "shard": "c/main"}),
        json.dumps({**GOOD, "member_id": ""}),
        json.dumps({**GOOD, "member_id": "m" * 3000}),
    ],
)
def test_a_damaged_file_is_an_error_and_is_kept(tmp_path: Path, content: str) -> None:
    written = content.encode(errors="surrogateescape")
    (tmp_path / "member").write_bytes(written)
    with pytest.raises(OSError, match="is damaged"):
        read_identity(tmp_path)
    with pytest.raises(OSError, match="is damaged"):
        IdentityFile(tmp_path, "main")
    assert (tmp_path / "member").read_bytes() == written
