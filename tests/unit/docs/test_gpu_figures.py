"""Figures of GPUs: vLLM alone beside kvpool, and what pages say about a run."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

import pytest

from gpu.comparison import NO_DEVICE, checked, compared, idle
from gpu.record import FIGURES_STAGE, NO_FIGURE, record
from gpu.run import Result
from support.paths import ROOT

ALONE: Final = {
    **{f"decode_tokens_per_s_at_{running}": 100.0 * running for running in (1, 8, 32, 64, 256)},
    "restart_new_prompt_ms": 80.0,
    "restart_known_prompt_ms": 81.0,
    "device_idle_percent": NO_DEVICE,
}
KVPOOL: Final = ALONE | {"decode_tokens_per_s_at_8": 720.0, "restart_known_prompt_ms": 12.5}
FACTS: Final = Result(
    "facts", "versions", "passed", 1, {"device": "cuda:0 a device", "torch": "2", "date": "now", "commit": "c"}
)
PAGES: Final = ("README.md", "docs/index.md", "docs/reference/gpu.md")
PICTURE: Final = "docs/images/vllm-on-a-gpu.svg"


def figures_stage(outcome: str, lacking: str = "", alone: Mapping[str, Any] = ALONE) -> Result:
    figures: dict[str, object] = {"lacking": lacking, **compared(alone, KVPOOL)}
    return Result(FIGURES_STAGE, "vLLM alone beside kvpool", outcome, 500, figures)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the pages that a run changes."""
    for page in PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    (tmp_path / PICTURE).parent.mkdir()
    return tmp_path


def test_ratio_is_that_of_kvpool_to_vllm_alone() -> None:
    found = compared(ALONE, KVPOOL)
    assert found["alone"] == ALONE
    assert found["kvpool"] == KVPOOL
    assert found["ratio"]["decode_tokens_per_s_at_8"] == 0.9
    assert found["ratio"]["device_idle_percent"] == NO_DEVICE


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), None, "many"])
def test_each_figure_is_a_positive_number(wrong: object) -> None:
    assert checked(ALONE) == ALONE
    with pytest.raises(ValueError, match="restart_new_prompt_ms"):
        checked({**ALONE, "restart_new_prompt_ms": wrong})


def test_a_figure_that_a_side_lacks_has_no_ratio() -> None:
    assert compared(ALONE, {**KVPOOL, "more": 1})["ratio"] == compared(ALONE, KVPOOL)["ratio"]
    assert compared({**ALONE, "more": 1}, KVPOOL)["ratio"] == compared(ALONE, KVPOOL)["ratio"]
    assert compared(ALONE, {**KVPOOL, "device_idle_percent": 1.0})["ratio"]["device_idle_percent"] == NO_DEVICE


def test_idle_time_is_what_no_kernel_or_copy_covers() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "ts": 0.0, "dur": 10.0},
        {"cat": "gpu_memcpy", "ts": 5.0, "dur": 2.0},
        {"cat": "cpu_op", "ts": 10.0, "dur": 30.0},
        {"cat": "kernel", "ts": 14.0, "dur": 6.0},
        {"ph": "M"},
    ]
    assert idle(events, 2) == {"device_idle_us_per_step": 2.0, "device_idle_percent": 20.0}
    assert set(idle(events[2:3], 2).values()) == {NO_DEVICE}


def test_pages_show_the_picture_of_a_run(root: Path) -> None:
    record([FACTS, figures_stage("passed")], root)
    for page in PAGES[:2]:
        (shown,) = re.findall(r"<!-- figure of tests/gpu --> !\[.*\]\((.*)\)", (root / page).read_text())
        assert ((root / page).parent / shown).resolve() == root / PICTURE
    texts = [each.text for each in ET.parse(root / PICTURE).iter() if each.text]  # noqa: S314 - drawn here
    values = ["100%", "90%", "100%", "100%", "100%", "81 ms", "80 ms", "12.5 ms"]
    assert [text for text in texts if text.endswith(("%", " ms"))] == values
    assert any("a device" in text and "2 of 2 stages" in text for text in texts)
    assert "| restart known prompt ms | 81.0 | 12.5 | 0.154 |" in (root / PAGES[2]).read_text()


def test_pages_show_the_picture_when_other_parts_failed_and_name_them(root: Path) -> None:
    record([FACTS, figures_stage("not done within 540 s", "kvpool poisson, scheduler")], root)
    assert (root / PICTURE).exists()
    for page in PAGES[:2]:
        assert NO_FIGURE not in (root / page).read_text()
    assert "1 of 2 stages passed. Without kvpool poisson, scheduler." in (root / PICTURE).read_text()
    assert "| lacking | kvpool poisson, scheduler |" in (root / PAGES[2]).read_text()


def test_pages_say_that_nothing_was_measured_without_the_figures_of_the_picture(root: Path) -> None:
    record([FACTS, figures_stage("passed")], root)
    rest = {name: value for name, value in ALONE.items() if name != "restart_known_prompt_ms"}
    record([FACTS, figures_stage("failed with status 1", "alone restart", rest)], root)
    assert not (root / PICTURE).exists()
    for page in PAGES[:2]:
        assert f"<!-- figure of tests/gpu --> {NO_FIGURE}\n" in (root / page).read_text()
    assert "decode tokens per s at 8" not in (root / PAGES[2]).read_text()


def test_a_shown_figure_that_a_stage_lacks_is_refused(root: Path) -> None:
    before = {page: (root / page).read_text() for page in PAGES}
    with pytest.raises(KeyError, match="memory has no figure"):
        record([FACTS, Result("memory", "", "passed", 1)], root)
    assert {page: (root / page).read_text() for page in PAGES} == before
