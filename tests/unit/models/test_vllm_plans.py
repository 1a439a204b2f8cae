"""`kvpool plan` has vLLM's layers and vLLM's plan, for configs of many architectures.

tests/engine/test_model_plans.py recorded what vLLM answered.
"""

import pytest

from support.plans import as_vllm_answers, derived, read_recorded

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


@pytest.mark.parametrize("architecture", ["Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"])
@pytest.mark.parametrize("case", [name for name in BUILT if name.startswith("Gemma4ForCausalLM")])
def test_a_multimodal_gemma_4_has_the_layers_of_its_language_model(case: str, architecture: str) -> None:
    row = RECORDED[case]
    text = {key: value for key, value in row["config"].items() if key != "architectures"}
    whole = {"architectures": [architecture], "dtype": "bfloat16", "text_config": text, "vision_config": {}}
    assert derived({**row, "config": whole})[0].layers == derived(row)[0].layers


def test_most_architectures_were_built() -> None:
    assert len({RECORDED[case]["config"]["architectures"][0] for case in BUILT}) >= 110
    assert {RECORDED[case]["ranks"] for case in BUILT} == {1, 2, 4, 8, 16}
