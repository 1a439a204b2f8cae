"""Runs the workloads of native engines on one in process, step by step, on GPUs one step ahead.

python -m gpu.native_program SPECIFICATION RESULTS     two JSON files
"""

import json
import sys
from pathlib import Path

from engine.run_engine import Run
from engine.tiny_engine import start_engine
from engine.workloads import Workload
from gpu.native_engine import at_once, kind_of, one_by_one


def main(specification: Path, results: Path) -> None:
    """Reads one file and writes the other."""
    given = json.loads(specification.read_text())
    kind = kind_of(given["device"])
    workloads = {"one by one": Workload(one_by_one(kind)), "at once": Workload(at_once(kind))}
    # As `vllm serve`: engines with more tokens in flight declare other memory, and a lender would replace it.
    engine = start_engine({"async_scheduling": kind.expected["is_async"], **given["llm"]})
    outcomes = {name: Run(engine, name, workload).outcome() for name, workload in workloads.items()}
    (facts,) = engine.collective_rpc("facts")
    results.write_text(json.dumps({"facts": facts, "outcomes": outcomes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
