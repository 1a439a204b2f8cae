"""`kvpool plan` has vLLM's layers and vLLM's plan, for configs of many architectures.

tests/engine/test_model_plans.py recorded what vLLM answered.
"""

import pytest

from support.plans import as_vllm_answers, derived, read_recorded
from support.plans_table import PAGE, generated, rows_of

RECORDED = read_recorded()
BUILT = sorted(name for name, row in RECORDED.items() if "error" not in row)


@pytest.mark.parametrize("case", BUILT)
def test_layers_and_plan_are_those_of_vllm(case: str) -> None:
    row = RECORDED[case]
    ours = as_vllm_answers(*derived(row))
    assert ours == {key: row[key] for key in ours}


@pytest.mark.parametrize("case", sorted({*RECORDED} - {*BUILT}))
def test_what_vllm_builds_on_a_gpu_only_is_read(case: str) -> None:
    model, plan = derived(RECORDED[case])
    assert model.layers
    assert plan.num_blocks


def test_most_architectures_were_built() -> None:
    assert len({RECORDED[case]["config"]["architectures"][0] for case in BUILT}) >= 110
    assert {RECORDED[case]["ranks"] for case in BUILT} == {1, 2, 4, 8, 16}


def test_the_table_of_the_documentation_is_the_one_that_is_generated() -> None:
    assert rows_of(PAGE.read_text()) == generated().splitlines()
