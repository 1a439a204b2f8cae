"""The first token of prompts that were evicted: computed again by vLLM alone, copied back by vLLM on host memory.

Both have the same memory for keys and values, which is too small for the prompts. Prints one JSON object.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from engine.vllm_serve import VllmServe
from engine.workloads import Request
from gpu.comparison import Figures, checked, compared
from gpu.native_engine import ALONE, ANSWER_TOKENS, LENT, Place, closed_by_sigterm
from gpu.vllm_figures import SIZES, Side, check_hits, first_token_ms

NUM_BLOCKS: Final = {"cuda": (1024, 3072), "cpu": (48, 192)}
"""Blocks of an engine, which hold fewer prompts than are known; and of host memory, which hold all prompts."""
BLOCK_BYTES: Final = {"cuda": 2 * 2**20, "cpu": 32 * 2**10}


def revisit(side: Side, engine: VllmServe, num_others: int) -> Figures:
    """The first token of new prompts, and of the same ones after others have evicted them.

    The answer of one that was hit on the device is the same when it is hit in host memory.
    """
    answered, warm, *known = side.known
    request = Request(tuple(answered), ANSWER_TOKENS)
    first_token_ms(engine, side.prompts(1, side.sizes.known_tokens))  # the device loads its kernels
    figures = {"new_prompt_ms": first_token_ms(engine, [warm, *known])}
    engine.complete(request)
    before = engine.complete(request)
    first_token_ms(engine, side.prompts(num_others, side.sizes.known_tokens))
    figures["evicted_prompt_ms"] = first_token_ms(engine, known)
    check_hits(engine, warm, is_warm=side.setup.is_lent)
    after = engine.complete(request)
    assert not side.setup.is_lent or after == before, f"{after} from host memory, {before} before"
    return checked(figures)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    os.environ["KVPOOL_FRESH_PROCESSES"] = "1"  # the service is measured, too
    kind = device.partition(":")[0]
    num_blocks, num_host_blocks = NUM_BLOCKS[kind]
    memory_bytes, host_bytes = num_blocks * BLOCK_BYTES[kind], num_host_blocks * BLOCK_BYTES[kind]
    sizes = replace(SIZES[kind], known_prompts=5, options={"num_gpu_blocks_override": num_blocks})
    with closed_by_sigterm() as stack:
        place = Place(stack, "llama", device)
        place.kind = replace(place.kind, memory_bytes=memory_bytes, host_bytes=host_bytes)
        choices = dict(place.kind.options)
        num_others = num_blocks * place.kind.block_tokens // sizes.known_tokens + 1
        figures: dict[str, Figures] = {}
        for name, setup in (("alone", ALONE), ("kvpool", LENT)):
            with TemporaryDirectory() as traces:
                side = Side(place, setup, sizes, choices, Path(traces))
                with side.engine() as engine:
                    figures[name] = revisit(side, engine, num_others)
    sys.stdout.write(json.dumps({"known_prompt_tokens": sizes.known_tokens, **compared(**figures)}) + "\n")


if __name__ == "__main__":
    main()
