import pytest
from rich.cells import cell_len

from kvpool.cli.text import clean, duration, fit, percent, short


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"), (0.04, "0.0"), (0.3, "0.3"), (9.94, "9.9"), (9.96, "10"), (42, "42"), (999.4, "999"), (999.5, "1.0k"),
        (1234, "1.2k"), (99_940, "99.9k"), (99_960, "100k"), (999_600, "1.0M"), (12_000_000, "12.0M"), (5e15, "5000T"),
    ],
)  # fmt: skip
def test_a_number_takes_at_most_five_characters(value: float, written: str) -> None:
    assert short(value) == written
    assert len(written) <= 5


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0.0s"), (9.94, "9.9s"), (9.96, "10s"), (59.4, "59s"), (59.6, "1m00s"), (184, "3m04s"), (3599.7, "1h00m"),
        (7380, "2h03m"), (86_399.9, "1d00h"), (446_400, "5d04h"), (35_000_000, "405d"),
    ],
)  # fmt: skip
def test_a_time_takes_at_most_six_characters(seconds: float, written: str) -> None:
    assert duration(seconds) == written
    assert len(written) <= 6


def test_a_share_takes_at_most_five_characters() -> None:
    assert [percent(share) for share in (None, 0.0, 0.3734, 0.9994, 0.9996, 1.0)] == [
        "-", "0.0%", "37.3%", "99.9%", "100%", "100%"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "llama", "a" * 300, "模型模型模型", "a模型", "e\u0301tude", "👩‍💻 gpu"])
@pytest.mark.parametrize("width", [0, 1, 2, 5, 6, 20])
def test_a_text_is_cut_or_filled_up_to_its_cells(text: str, width: int) -> None:
    assert cell_len(fit(text, width)) == width


def test_a_cut_is_marked() -> None:
    assert (fit("scheduler", 6), fit("scheduler", 6, ascii_only=True), fit("模型模型", 5)) == (
        "sched…", "sched~", "模型…"
    )  # fmt: skip


def test_unprintable_characters_are_replaced() -> None:
    assert clean("\x1b[2Ja\tb\nc\u202ed\x9b") == "?[2Ja?b?c?d?"
    assert clean("Zoë 模", ascii_only=True) == "Zo? ?"
