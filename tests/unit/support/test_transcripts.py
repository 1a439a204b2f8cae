"""A transcript fails if it differs from what its commands do, also while it is rewritten."""

from pathlib import Path

import pytest

from support.transcripts import check

STALE, FRESH = "# one command\n\n> add 1 2\n4\n", "# one command\n\n> add 1 2\n3\n"


def add(_: str, *numbers: str) -> list[str]:
    return [str(sum(map(int, numbers)))]


@pytest.mark.parametrize(("rewrites", "left"), [("", STALE), ("1", FRESH)])
def test_a_difference_fails_and_is_written_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewrites: str, left: str
) -> None:
    monkeypatch.setenv("KVPOOL_REWRITE", rewrites)
    path = tmp_path / "sums.txt"
    path.write_text(STALE)
    with pytest.raises(AssertionError, match=r"-4\n\+3"):
        check(path, add)
    assert path.read_text() == left
    path.write_text(FRESH)
    check(path, add)


def test_a_transcript_without_a_command_fails(tmp_path: Path) -> None:
    path = tmp_path / "sums.txt"
    path.write_text("# nothing\n")
    with pytest.raises(AssertionError, match="has no command"):
        check(path, add)
