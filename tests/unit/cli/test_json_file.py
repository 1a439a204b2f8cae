"""JSON files of an operator: read, or refused with one sentence, within bounded memory and time."""

import json
from pathlib import Path

import pytest

from kvpool.cli.json_file import MAX_FILE_CHARACTERS, read_json

MANY = 250_000
REFUSED = {
    "empty file": " \n",
    "not JSON: nested too deeply": "[" * 1_000_000,
    "not JSON: Expecting value": "[1,",
    "'last' occurs twice in an object": json.dumps({str(i): i for i in range(MANY)})[:-1] + ', "last": 1, "last": 2}',
    f"longer than {MAX_FILE_CHARACTERS:,} characters": "[" * (MAX_FILE_CHARACTERS + 1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_hostile_file_is_refused(message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(REFUSED[message])
    with pytest.raises(ValueError, match=message) as caught:
        read_json(path)
    assert len(str(caught.value)) < 200


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than"):
        read_json(Path("/dev/zero"))


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(path) == [1]
