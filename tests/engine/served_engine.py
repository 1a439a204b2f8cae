"""A vLLM engine that serves requests from stdin until stdin ends.

    python -m engine.served_engine LLM     arguments of `vllm.LLM`, as JSON

Reads a JSON list per line: a request's name, its tokens and how many to generate. Writes a JSON object per step to
stdout: {"ready": true} at first, then {NAME: [number of cached tokens, new tokens, whether it has finished]}. What vLLM
and the libraries below it print goes to stderr.
"""

import json
import os
import queue
import sys
import threading
from typing import Any, TextIO

from vllm.sampling_params import RequestOutputKind

from engine.tiny_engine import add_request, start_engine
from engine.workloads import Request

_Line = tuple[str, list[int], int] | None


def _read(lines: "queue.SimpleQueue[_Line]") -> None:
    for line in sys.stdin:
        name, tokens, max_tokens = json.loads(line)
        lines.put((name, tokens, max_tokens))
    lines.put(None)


def serve(llm: dict[str, Any], out: TextIO) -> None:
    """Serves until stdin ends and all requests are done."""
    engine = start_engine(llm)
    lines: queue.SimpleQueue[_Line] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    print(json.dumps({"ready": True}), file=out, flush=True)
    is_open, count = True, 0
    while is_open or engine.has_unfinished_requests():
        while is_open and (not lines.empty() or not engine.has_unfinished_requests()):
            line = lines.get()
            if line is None:
                is_open = False
                break
            name, tokens, max_tokens = line
            request = Request(tokens, max_tokens)
            add_request(engine, name, count, request, output_kind=RequestOutputKind.DELTA)
            count += 1
        if engine.has_unfinished_requests():
            step = {
                output.request_id: [output.num_cached_tokens, list(output.outputs[0].token_ids), output.finished]
                for output in engine.step()
            }
            print(json.dumps(step), file=out, flush=True)
    engine.engine_core.shutdown()


def main(llm: dict[str, Any]) -> None:
    """Keeps stdout for what this program reports."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(llm, out)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
