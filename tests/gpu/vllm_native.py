"""vLLM as its users run it on a GPU, alone and on kvpool; see native_engine.py. Prints one JSON object.

Models of usual size in bfloat16, FlashAttention, CUDA graphs, async scheduling, chunked prefill. Engines run in
process, step by step, and under `vllm serve`. Sums of floats depend on the shape of a batch, so tokens are compared
where batches are alike: step by step, and one request after the other. Of requests that users send at once, half of
the first tokens must be equal. What they answered, and their logs, are in files in the folder $OUT.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

os.environ.update(
    KVPOOL_FRESH_PROCESSES="1",  # compilers and CUDA want interpreters of their own
    TORCHINDUCTOR_DETERMINISTIC="1",  # engines would choose kernels by their speed, and sum in different orders
)

from engine.vllm_serve import Completion, VllmServe
from gpu.native_engine import ALONE, LENT, OWN, Place, at_once, kind_of, one_by_one, stop
from kvpool.client import PoolInfo, connect
from support.waiting import wait_until

_SERVED: Final = "served"
_VLLMS, _KVPOOLS = "vllm.v1.core.sched", "kvpool.client.vllm"


class DidNotStartError(Exception):
    """An engine did not start with some options."""


@dataclass(slots=True)
class Found:
    """What engines of a model answered and used.

    Attributes:
        programs: Results of native_program.py: alone, own, lent.
        rounds: Answers of `vllm serve` to the same requests, one after the other, round by round. The engines on lent
            memory, first and second, begin with the second round: that of another process came before.
        bursts: Its answers to requests that come at once.
        facts: What its engines use.
        pools: What the service counted.
    """

    programs: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: dict[str, list[list[Completion]]] = field(default_factory=dict)
    bursts: dict[str, list[Completion]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    pools: dict[str, PoolInfo] = field(default_factory=dict)


def collect(place: Place, found: Found) -> None:
    """Runs the engines: alone, on kvpool and on lent memory all at once, then two more on the lent memory."""
    programs = {setup.name: place.run(setup, setup.name) for setup in (LENT, ALONE, OWN)}
    served = {setup.name: place.serve(setup, _SERVED) for setup in (ALONE, OWN)}
    try:
        served[ALONE.name].wait_ready(place.kind.start_seconds)
    except AssertionError as error:
        raise DidNotStartError(str(error)) from error
    served[OWN.name].wait_ready(place.kind.start_seconds)
    _report("vllm serve answers")
    for name, engine in served.items():
        found.rounds[name] = [_round(place, engine) for _ in range(3)]
    _take(place, found, served, _SERVED)
    found.programs = {name: program.results(place.kind.start_seconds) for name, program in programs.items()}
    _report("engines in process have ended")
    for engine in served.values():
        stop(engine)

    served = {name: place.serve(LENT, LENT.name) for name in ("first", "second")}
    for engine in served.values():
        engine.wait_ready(place.kind.start_seconds)
    _report("two vllm serve on one memory answer")
    found.rounds["first"] = [_round(place, served["first"])]
    with ThreadPoolExecutor() as threads:
        third = threads.map(lambda engine: _round(place, engine), served.values())
        for name, answers in zip(served, third, strict=True):
            found.rounds.setdefault(name, []).append(answers)
    _take(place, found, served, LENT.name)
    for engine in served.values():
        stop(engine)


def _take(place: Place, found: Found, served: Mapping[str, VllmServe], pool: str) -> None:
    """Has requests come at once to all engines, and notes what they use and what the service counts."""
    for name, engine in served.items():
        (found.facts[name],) = engine.post("/collective_rpc", {"method": "facts"})["results"]
    requests = at_once(place.kind)
    with ThreadPoolExecutor(len(served) * len(requests)) as users:
        sent = {name: [users.submit(engine.complete, each) for each in requests] for name, engine in served.items()}
        found.bursts |= {name: [each.result() for each in answers] for name, answers in sent.items()}
    with connect(place.server) as client:
        wait_until(lambda: not client.get_pool(pool).requests, "requests are left")
        found.pools[pool] = client.get_pool(pool)


def _round(place: Place, engine: VllmServe) -> list[Completion]:
    return [engine.complete(each) for each in one_by_one(place.kind)]


def check(found: Found, expected: Mapping[str, object]) -> None:
    """Compares what was found. `expected` is what engines use, see `Kind`."""
    alone = found.programs[ALONE.name]["outcomes"]
    for name in (OWN.name, LENT.name):
        for workload, outcome in found.programs[name]["outcomes"].items():
            for what in ("requests", "counters", "tables"):
                _check_equal(outcome[what], alone[workload][what], f"{name}, {workload}, {what}")
    rounds = found.rounds[ALONE.name]
    in_process = [
        Completion(answer["token_ids"], answer["num_cached_tokens"]) for (answer,) in alone["one by one"]["requests"]
    ]
    _check_equal(rounds[0], in_process, "vllm serve alone, and in process")
    _check_equal(found.rounds[OWN.name], rounds, "vllm serve on kvpool")
    _check_equal(found.rounds["first"], rounds[1:], "the first vllm serve on lent memory")
    _check_equal(found.rounds["second"], rounds[2:], "the second vllm serve on lent memory")
    hits = [_hits(each) for each in rounds]
    assert hits[1] > hits[0] > 0, f"hits of vllm serve alone: {hits}"
    for name, burst in found.bursts.items():
        lengths = [len(answer["token_ids"]) for (answer,) in alone["at once"]["requests"]]
        _check_equal([len(each.tokens) for each in burst], lengths, f"{name}, lengths")
        equal = _equal_first(found, burst)
        assert 2 * equal >= len(burst), f"{name}: {equal} of {len(burst)} first tokens of requests at once are equal"
    _check_pools(found)
    _check_facts(found, expected)


def _check_equal(found: Any, expected: Any, what: str) -> None:
    """Compares values; reports the first that differs where it is."""
    if found == expected:
        return
    if isinstance(found, Completion):
        found, expected = asdict(found), asdict(expected)
    if isinstance(found, Mapping) and found.keys() == expected.keys():
        for name in found:
            _check_equal(found[name], expected[name], f"{what}, {name}")
    if isinstance(found, list) and len(found) == len(expected):
        for number, both in enumerate(zip(found, expected, strict=True)):
            _check_equal(*both, f"{what}, {number}")
    raise AssertionError(f"{what}: {found}, not {expected}")


def _check_pools(found: Found) -> None:
    """The service has counted the hits that users see."""
    served, lent = found.pools[_SERVED], found.pools[LENT.name]
    answers = [*found.rounds[OWN.name], found.bursts[OWN.name]]
    _check_equal(served.prefix_cache.hits_tokens, sum(map(_hits, answers)), "hits of vllm serve on kvpool")
    _check_equal((served.sessions, lent.sessions), (1, 2), "sessions")
    shared_tokens, first = lent.prefix_cache.shared_hits_tokens, _hits(found.rounds["first"][0])
    assert shared_tokens >= first > 0, f"{shared_tokens} hit tokens that another process has computed, not {first}"


def _check_facts(found: Found, expected: Mapping[str, object]) -> None:
    """Engines have used what they were to use."""
    in_process = {f"{name}, in process": results["facts"] for name, results in found.programs.items()}
    for name, facts in (found.facts | in_process).items():
        setup = name.partition(",")[0]
        must = {
            **expected,
            "dtype": "bfloat16",
            "is_chunked": True,
            "scheduler": _VLLMS if setup == ALONE.name else _KVPOOLS,
            "is_lent": setup not in {ALONE.name, OWN.name},
        }
        _check_equal({what: facts[what] for what in must}, must, f"{name} uses")


def _hits(answers: Sequence[Completion]) -> int:
    return sum(each.cached_tokens for each in answers)


def _equal_first(found: Found, burst: Sequence[Completion]) -> int:
    """How many answers begin with the same token as those of vLLM alone, step by step."""
    expected = found.programs[ALONE.name]["outcomes"]["at once"]["requests"]
    return sum(each.tokens[0] == answer["token_ids"][0] for each, (answer,) in zip(burst, expected, strict=True))


def figures(found: Found, options: str) -> dict[str, object]:
    """What the checks have compared."""
    facts = found.facts[ALONE.name]
    alone = found.programs[ALONE.name]["outcomes"]["at once"]
    return {
        "options": options,
        "attention": " ".join(map(str, facts["attention"] + facts["flash_attention"])),
        "compilation_mode": facts["compilation"],
        "graphs_captured": f"{facts['graphs']} {facts['graph_mode']}",
        "model_runner": facts["runner"],
        "blocks": facts["blocks"],
        "requests": sum(len(outcome["requests"]) for outcome in found.programs[ALONE.name]["outcomes"].values()),
        "most_requests_in_a_step": max(running for running, _, _ in alone["steps"]),
        "hit_tokens_of_the_first_round": _hits(found.rounds[ALONE.name][0]),
        "hit_tokens_of_the_second_round": _hits(found.rounds[ALONE.name][1]),
        "hit_tokens_that_another_process_computed": found.pools[LENT.name].prefix_cache.shared_hits_tokens,
        **{f"equal_first_tokens_{name}": _equal_first(found, burst) for name, burst in found.bursts.items()},
    }


def run_model(model: str, device: str, all_options: dict[str, Mapping[str, object]]) -> dict[str, object]:
    """Runs and checks the engines of a model with the first options with which they start; returns figures.

    Takes options with which they do not start out of `all_options`, see `Kind.options`.
    """
    for name, options in tuple(all_options.items()):
        found = Found()
        try:
            with ExitStack() as stack:
                place = Place(stack, model, device, options)
                signal.signal(signal.SIGTERM, lambda *_, place=place: place.terminate())
                stack.callback(_write, model, place, found)
                collect(place, found)
        except DidNotStartError as error:
            _report(f"{model}, {name}: {error}")
            del all_options[name]
            continue
        check(found, kind_of(device).expected)
        return figures(found, name)
    raise AssertionError(f"{model}: no engine has started")


def _write(model: str, place: Place, found: Found) -> None:
    """Writes what the engines of a model have answered so far, and their logs."""
    folder = Path(os.environ.get("OUT", "gpu-results"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"vllm-native-{model}.json").write_text(json.dumps(asdict(found), default=str))
    logs = [f"=== {name}\n{process.log}" for name, process in place.processes.items()]
    (folder / f"vllm-native-{model}.log").write_text("\n".join(logs))


def _report(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%X')} {line}\n")
    sys.stderr.flush()


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--models", default="llama,gemma", help="some of llama,gemma")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    options = dict(kind_of(arguments.device).options)
    figures_of = {model: run_model(model, arguments.device, options) for model in models}
    sys.stdout.write(json.dumps(figures_of) + "\n")


if __name__ == "__main__":
    main()
