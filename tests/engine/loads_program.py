"""Loads weights and LoRAs from files into one vLLM engine, and asks it the same prompt each time.

python -m engine.loads_program SPECIFICATION RESULTS     two JSON files

The specification has the arguments of `vllm.LLM`, and the LoRAs to ask with one after the other: None for the model
alone; a folder; or a folder and a seed, to write another LoRA there and to load it in place.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from engine.drawn_weights import write_adapter
from engine.models import LLAMA
from engine.tiny_engine import start_engine

PROMPT = [i * 7 % 500 for i in range(200)]


def _answer(engine: Any, name: str, lora: Any) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    engine.add_request(name, {"prompt_token_ids": PROMPT}, params, lora_request=lora)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    found = outputs[-1].outputs[0]
    logprobs = [each[token].logprob for each, token in zip(found.logprobs, found.token_ids, strict=True)]
    cached = outputs[-1].num_cached_tokens
    return {"token_ids": list(found.token_ids), "logprobs": logprobs, "num_cached_tokens": cached}


def run(specification: dict[str, Any]) -> list[dict[str, Any]]:
    """Asks with each LoRA."""
    engine = start_engine(specification["llm"])
    answers = []
    for i, asked in enumerate(specification["loras"]):
        lora = None
        if asked:
            folder, seed = asked
            if seed:
                write_adapter(Path(folder), LLAMA, seed)
            lora = LoRARequest("sql", 1, folder, load_inplace=bool(seed))
            engine.add_lora(lora)
        answers.append(_answer(engine, f"{i}", lora))
    return answers


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
