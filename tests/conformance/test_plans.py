"""The planner makes the plans of the reference, with equal numbers and names, and refuses with the same facts."""

import gzip
import json
from typing import Any

import pytest

from conformance.conftest import golden_dir
from conformance.golden import Line, spec
from kvpool.core.planning.plan import GIB, FitCheck, KVCacheConfig, Plan, PlanError, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import UniformTypeKVCacheSpecs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        path = golden_dir(metafunc.config) / "plans.json.gz"
        cases = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else []
        metafunc.parametrize("case", [pytest.param(case, id=case["name"]) for case in cases])


def plan(case: Line, fit_check: FitCheck) -> Plan:
    ranks = [
        RankMemory({name: spec(value) for name, value in worker["specs"].items()}, worker["available_memory_bytes"])
        for worker in case["workers"]
    ]
    given = dict(case["options"])
    given["num_blocks_override"] = given.pop("num_gpu_blocks_override") or 0
    return get_kv_cache_configs(ranks, PlanOptions(**given, fit_check=fit_check))


def config_to_line(config: KVCacheConfig) -> Line:
    return {
        "num_blocks": config.num_blocks,
        "tensors": [{"size": tensor.size_bytes, "shared_by": list(tensor.shared_by)} for tensor in config.tensors],
        "groups": [
            {"layer_names": list(group.layer_names), "spec": spec_to_line(group.spec)} for group in config.groups
        ],
    }


def spec_to_line(value: KVCacheSpec) -> Line:
    """The numbers of a spec that the golden files contain, and its page size."""
    line: Line = {"page_size_bytes": value.page_size_bytes, "spec": value}
    if isinstance(value, UniformTypeKVCacheSpecs):
        line["spec"] = {name: spec_to_line(layer) for name, layer in value.layers}
    return line


def expected_spec(golden: Line) -> Line:
    if golden["type"] == "UniformTypeKVCacheSpecs":
        layers = {name: expected_spec(layer) for name, layer in golden["layers"].items()}
        return {"page_size_bytes": golden["page_size_bytes"], "spec": layers}
    return {"page_size_bytes": golden["page_size_bytes"], "spec": spec(golden)}


def expected(worker: Line) -> Line:
    groups = [{**group, "spec": expected_spec(group["spec"])} for group in worker["groups"]]
    return {**worker, "groups": groups}


def check_plan(answer: Plan, result: Line) -> None:
    assert [config_to_line(config) for config in answer.configs] == [expected(worker) for worker in result["workers"]]
    assert answer.max_model_len == result["max_model_len"]
    if "max_concurrency" in result:
        assert answer.max_concurrency == pytest.approx(result["max_concurrency"], rel=1e-12)


def check_error(error: PlanError, golden: Line) -> None:
    facts: Line = {"reason": error.reason.lower()}
    if "needed_gib" in golden:
        facts |= {
            "needed_gib": round(error.needed_bytes / GIB, 2),
            "available_gib": round(error.available_bytes / GIB, 2),
            "max_model_len": error.max_model_len,
            "estimated_max_model_len": error.estimated_max_model_len,
        }
        assert f"{golden['needed_gib']:.2f} GiB" in error.message
        assert f"{golden['available_gib']:.2f} GiB" in error.message
        assert str(golden["estimated_max_model_len"]) in error.message
    assert facts == golden


def test_plans_equal_the_reference(case: dict[str, Any]) -> None:
    if case.get("error", {}).get("reason") == "page_sizes_do_not_divide":  # the reference cannot plan this
        padded = plan(case, FitCheck.FIRST_GROUP).configs[0]
        assert padded.block_size_bytes == 8 * 49152
        assert padded.padding_bytes_per_block == (0, 8 * 16384, 8 * 16384)
    elif "error" in case:
        with pytest.raises(PlanError) as caught:
            plan(case, FitCheck.FIRST_GROUP)
        check_error(caught.value, case["error"])
    else:
        check_plan(plan(case, FitCheck.FIRST_GROUP), case["result"])


BEYOND = {
    "auto_fit": 16_384 - 16,  # the null block of 1,024 blocks is never allocated
    "not_enough_memory": 8192 - 16,
    "dcp2": 30_464 - 128,
    "auto_fit_gemma": (4915 - 1 - 6 * 193) * 16,  # all groups take blocks, not only the first
    "not_enough_memory_gemma": (4096 - 1 - 6 * 193) * 16,
}
"""The longest request that the pool can serve, by case, where the reference gives another length."""


def test_whole_request_plans_differ_only_where_the_reference_undercounts(case: dict[str, Any]) -> None:
    golden = case.get("result") or case["error"]
    if case["name"].startswith("auto_fit") and case["name"] in BEYOND:
        answer = plan(case, FitCheck.WHOLE_REQUEST)
        assert answer.max_model_len == answer.longest_request_tokens == BEYOND[case["name"]] < golden["max_model_len"]
        assert [config_to_line(config) for config in answer.configs] == [expected(w) for w in golden["workers"]]
    elif case["name"] in BEYOND:
        with pytest.raises(PlanError) as caught:
            plan(case, FitCheck.WHOLE_REQUEST)
        assert caught.value.estimated_max_model_len == BEYOND[case["name"]]
        assert golden.get("estimated_max_model_len", 131_072) > BEYOND[case["name"]]
        assert caught.value.needed_bytes / GIB == pytest.approx(golden.get("needed_gib", 11.41), abs=0.015)
    elif "result" in case:
        check_plan(plan(case, FitCheck.WHOLE_REQUEST), golden)
    elif golden["reason"] != "page_sizes_do_not_divide":
        with pytest.raises(PlanError) as caught:
            plan(case, FitCheck.WHOLE_REQUEST)
        check_error(caught.value, golden)
