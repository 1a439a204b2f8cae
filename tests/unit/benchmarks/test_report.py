"""Reports: ratios, tables and comparisons of figures."""

from pathlib import Path

import pytest

from benchmarks.earlier import compare, read_earlier
from benchmarks.report import Report
from benchmarks.scale import QUICK
from benchmarks.tables import grids, markdown


@pytest.fixture
def report() -> Report:
    made = Report("1.0", {"python": "3", "grpcio": "1", "protobuf": "6", "cores": 2, "cpu": "x"}, QUICK)
    made.core = {"free_256": 10.0, "decode_step_256_requests": 300.0, "hash_us_per_block": 4.0}
    made.grpc = {"free_256": 400.0, "empty_step": 390.0, "echo_stream": 300.0}
    made.vllm = {"free_256": 40.0, "decode_step_256_requests": 600.0, "decode_step_256_requests_sha256": 500.0}
    made.vllm_version = "0.14.1"
    made.pool_sizes = {"1000": {"core_free_evict_32": 2.0}, "10000": {"core_free_evict_32": 3.0}}
    return made


def test_ratios_cover_common_figures_with_either_hash_of_vllm(report: Report) -> None:
    report.work_out_ratios()
    assert report.ratios == {
        "core_to_vllm": {
            "free_256": 0.25,
            "decode_step_256_requests": 0.5,
            "decode_step_256_requests_sha256": pytest.approx(0.6),
        },
        "grpc_to_vllm": {"free_256": 10.0},
        "empty_step_to_echo": {"grpc": 1.3},
        "pool_size_largest_to_smallest": {"core_free_evict_32": 1.5},
    }


def test_without_vllm_there_are_no_ratios_and_columns_of_it(report: Report) -> None:
    report.vllm = None
    report.work_out_ratios()
    assert report.as_json()["vllm"] is None
    assert not any("vllm" in name for name in report.ratios)
    assert not any("vLLM" in column for grid in grids(report) for column in grid.columns)


def test_tables_leave_out_missing_figures(report: Report) -> None:
    report.work_out_ratios()
    page = markdown(report)
    assert "| free 256 blocks | 10.0 | 400 | - | 40.0 | 0.25 | 10.00 | - |" in page
    assert "Sessions" not in page
    assert "hit" not in page


def test_common_figures_are_compared_by_path(report: Report) -> None:
    compare(report, {"core": {"free_256": 20.0, "gone": 1.0}, "pool_sizes": {"1000": {"core_free_evict_32": 4.0}}})
    assert report.compare == {"core.free_256": 0.5, "pool_sizes.1000.core_free_evict_32": 0.5}
    titles = [grid.title for grid in grids(report)]
    assert titles[-2:] == [
        "Cost of calls: this run / the earlier run",
        "Other figures: this run / the earlier run",
    ]


@pytest.mark.parametrize("text", ["", "text", "[]", '{"version": "1"}', '{"machine": {}}\nmore'])
def test_a_file_without_a_report_on_its_last_line_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="last line"):
        read_earlier(path)
