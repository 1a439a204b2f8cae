"""A vLLM engine that serves requests from stdin until stdin ends.

    python -m engine.served_engine LLM     arguments of `vllm.LLM`, as JSON

Reads a JSON list per line: a request's name, its tokens, how many to generate, and tokens that end it; or the name of
a request to abort; or a method of vLLM's LLMEngine to call, and its arguments in a list, functions by name. Writes a
JSON object per step to stdout: {"ready": true} at first, then {NAME: [number of cached tokens, new tokens, whether it
has finished]}, and {"called": [seconds, error]} for each call. What vLLM and the libraries below it print goes to
stderr.
"""

import json
import os
import queue
import sys
import threading
import time
from typing import Any, TextIO

from vllm.sampling_params import RequestOutputKind
from vllm.utils.import_utils import resolve_obj_by_qualname

from engine.tiny_engine import add_request, has_work, start_engine
from engine.workloads import Request

_Line = tuple[str, list[int], int, list[int]] | tuple[str, list[Any]] | tuple[str] | None


def _read(lines: "queue.SimpleQueue[_Line]") -> None:
    for line in sys.stdin:
        lines.put(tuple(json.loads(line)))
    lines.put(None)


def serve(llm: dict[str, Any], out: TextIO) -> None:
    """Serves until stdin ends and all requests are done."""
    engine = start_engine(llm)
    lines: queue.SimpleQueue[_Line] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    print(json.dumps({"ready": True}), file=out, flush=True)
    is_open, count = True, 0
    while is_open or has_work(engine):
        while is_open and (not lines.empty() or not has_work(engine)):
            line = lines.get()
            if line is None:
                is_open = False
                break
            if len(line) == 1:
                engine.abort_request(list(line))
                continue
            if len(line) == 2:
                print(json.dumps({"called": _call(engine, *line)}), file=out, flush=True)
                continue
            name, tokens, max_tokens, ends = line
            request = Request(tokens, max_tokens)
            add_request(engine, name, count, request, output_kind=RequestOutputKind.DELTA, stop_token_ids=ends)
            count += 1
        if has_work(engine):
            step = {
                output.request_id: [output.num_cached_tokens, list(output.outputs[0].token_ids), output.finished]
                for output in engine.step()
            }
            print(json.dumps(step), file=out, flush=True)
    engine.engine_core.shutdown()


def _call(engine: Any, method: str, arguments: list[Any]) -> tuple[float, str]:
    start = time.monotonic()
    try:
        if method == "apply_model":  # takes functions
            arguments = [resolve_obj_by_qualname(each) for each in arguments]
        getattr(engine, method)(*arguments)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return time.monotonic() - start, str(error)
    return time.monotonic() - start, ""


def main(llm: dict[str, Any]) -> None:
    """Keeps stdout for what this program reports."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(llm, out)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
