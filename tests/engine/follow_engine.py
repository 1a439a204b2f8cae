"""Runs a workload on one vLLM engine and reports each step after it ran, so that a process can be killed in between.

    python -m engine.follow_engine SCRIPT     a JSON file; see results.py

Writes a line of JSON a step to stdout, and nothing else, and where the script says so, waits for a line from stdin.
What vLLM and the libraries below it say goes to stderr. Whatever the engine raises is not caught.
"""

import json
import os
import sys
from pathlib import Path
from typing import TextIO

from vllm.sampling_params import RequestOutputKind

from engine.results import Script, StepLine
from engine.tiny_engine import add_request, start_engine
from engine.workloads import make_workload


def follow(script: Script, lines: TextIO) -> None:
    """Starts an engine and puts it through a workload, step by step."""
    engine = start_engine(script["llm"])
    workload = make_workload(script["workload"])
    step = 0
    while engine.has_unfinished_requests() or step <= workload.last_event:
        if step in script["pauses"]:
            print(json.dumps("paused"), file=lines, flush=True)
            sys.stdin.readline()
        for index, request in enumerate(workload.requests):
            if request.arrives == step:
                add_request(engine, str(index), index, request, output_kind=RequestOutputKind.DELTA)
        line: StepLine = {}
        for output in engine.step():
            (answer,) = output.outputs
            logprobs = [at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            tokens = list(zip(answer.token_ids, logprobs, strict=True))
            line[output.request_id] = {"num_cached_tokens": output.num_cached_tokens, "tokens": tokens}
        print(json.dumps(line), file=lines, flush=True)
        step += 1


def main(script: Path) -> None:
    """Reads the script, and keeps stdout for what this program says."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as lines:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        follow(json.loads(script.read_text()), lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
