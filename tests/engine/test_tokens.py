"""A real vLLM engine on the service gives every token that vLLM gives with its own KV cache manager.

More than that: the same logprobs to the last bit, so that no block was read that holds something else; the same hits
and counters; after each step as many running and waiting requests, and the same blocks in their tables. And what the
plain engine does is looked at, too, so that the comparison is of engines that share, evict, preempt and abort.
"""

import math

import pytest

from engine.models import GEMMA, GEMMA4, LFM2, LLAMA, LLAMA4, QWEN3_NEXT
from engine.pairs import PLAIN_SCHEDULER, POOLED_SCHEDULER, Engine, Pair, Pairs
from engine.results import Answer, Outcome
from engine.workloads import make_workload

_SMALL_STEPS: dict[str, object] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 128,
    "long_prefill_token_threshold": 80,
}
# All blocks of a window can be found, not only those that vLLM by default thinks worth it.
_DENSE = {"prefix_cache_retention_interval": None}
ENGINES = {
    "llama": Engine(
        LLAMA,
        256,
        (
            "shared prefixes",
            "repeats",
            "conversations",
            "salts",
            "copies",
            "prompt logprobs",
            "batch sizes",
            "aborts",
            "reset",
            "chat",
        ),
        {"max_num_seqs": 64},
    ),
    "llama-chunked": Engine(
        LLAMA,
        100,
        ("long prompts",),
        {"max_num_seqs": 8, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 40},
        is_complete=True,
    ),
    "llama-small": Engine(LLAMA, 40, ("crowded", "crowded aborts"), {"max_num_seqs": 32}),
    "llama-priority": Engine(
        LLAMA,
        40,
        ("priorities",),
        {"max_num_seqs": 32, "max_num_batched_tokens": 256, "scheduling_policy": "priority"},
        is_complete=True,
    ),
    "gemma": Engine(
        GEMMA,
        700,
        ("shared prefixes", "repeats", "conversations", "salts", "aborts", "reset", "chat"),
        {"max_num_seqs": 64},
    ),
    "gemma-small": Engine(
        GEMMA,
        150,
        ("long prompts", "crowded", "crowded aborts"),
        _SMALL_STEPS | _DENSE,
    ),
    "gemma4": Engine(
        GEMMA4,
        120,
        ("crowded aborts", "chat"),
        _SMALL_STEPS,
    ),
    "gemma4-large": Engine(
        GEMMA4,
        500,
        ("shared prefixes", "repeats", "conversations", "salts", "aborts", "reset"),
        {"max_num_seqs": 64},
        is_complete=True,
    ),
    "gemma4-dense": Engine(
        GEMMA4,
        100,
        ("long prompts", "crowded"),
        _SMALL_STEPS | _DENSE,
        is_complete=True,
    ),
    "lfm2": Engine(
        LFM2,
        120,
        ("crowded", "aborts", "shared prefixes"),
        {"max_num_seqs": 64, "max_num_batched_tokens": 256, "enable_prefix_caching": False},
        is_complete=True,
    ),
    "llama4": Engine(
        LLAMA4,
        150,
        ("long prompts", "crowded aborts", "chat"),
        _SMALL_STEPS,
        is_complete=True,
    ),
    "lfm2-cached": Engine(
        LFM2,
        150,
        ("crowded aborts", "chat"),
        {"max_num_seqs": 32, "max_num_batched_tokens": 256},
    ),
    "lfm2-partial": Engine(  # hits end within blocks, whose copies the engine makes
        LFM2,
        150,
        ("crowded aborts", "chat"),
        {"max_num_seqs": 32, "max_num_batched_tokens": 256, "prefix_match_unit": 8},
        is_complete=True,
    ),
    "qwen3-next": Engine(
        QWEN3_NEXT,
        60,
        ("crowded aborts", "chat"),
        {"max_num_seqs": 32, "max_num_batched_tokens": 256, "dtype": "bfloat16"},
        is_complete=True,
    ),
}
_FULL, _WINDOWS, _STATES = "FullAttentionSpec", "SlidingWindowSpec", "MambaSpec"
GROUPS = {
    "llama": {_FULL},
    "gemma": {_WINDOWS, _FULL},
    "gemma4": {_WINDOWS, _FULL},
    "lfm2": {_STATES, _FULL},
    "llama4": {"ChunkedLocalAttentionSpec", _FULL},
    "qwen3": {_STATES, _FULL},
}
"""The kinds of KV cache that a model has."""
CROWDED = ("crowded", "crowded aborts", "priorities")


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.complete] if ENGINES[name].is_complete else []


def cases(*workloads: str, caching: bool = False) -> pytest.MarkDecorator:
    """Every engine, or those that cache, with every workload that it runs, or with those that are named."""
    chosen = [
        pytest.param(name, workload, id=f"{name}-{workload.replace(' ', '_')}", marks=_marks(name))
        for name, engine in ENGINES.items()
        for workload in engine.workloads
        if (not workloads or workload in workloads) and (not caching or engine.caches)
    ]
    return pytest.mark.parametrize(("pair", "workload"), chosen, indirect=["pair"])


@pytest.fixture(scope="module")
def pairs(address: str, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(ENGINES, address, tmp_path_factory.mktemp("engines"))


@pytest.fixture
def pair(request: pytest.FixtureRequest, pairs: Pairs) -> Pair:
    """Both engines of that name, after all their workloads."""
    name: str = request.param
    return pairs.run(name)


@pytest.mark.parametrize(
    ("pair", "name"),
    [pytest.param(name, name, id=name, marks=_marks(name)) for name in ENGINES],
    indirect=["pair"],
)
def test_engines_differ_in_their_scheduler_alone(pair: Pair, name: str) -> None:
    assert pair.plain["scheduler"] == PLAIN_SCHEDULER
    assert pair.pooled["scheduler"] == POOLED_SCHEDULER
    assert pair.plain["num_blocks"] == pair.pooled["num_blocks"] == ENGINES[name].num_blocks
    assert pair.plain["groups"] == pair.pooled["groups"]
    assert {kind for kind, _ in pair.plain["groups"]} == GROUPS[name.partition("-")[0]]


@cases()
def test_every_answer_is_the_same(pair: Pair, workload: str) -> None:
    """Tokens, their logprobs to the last bit, num_cached_tokens and finish reasons."""
    plain, pooled = pair.outcomes(workload)
    different = [
        (index, expected, answers)
        for index, (expected, answers) in enumerate(zip(plain["requests"], pooled["requests"], strict=True))
        if answers != expected
    ]
    assert not different, f"{len(different)} of {len(plain['requests'])}, the first: {different[0]}"


@cases()
def test_every_step_is_the_same(pair: Pair, workload: str) -> None:
    """What runs, what waits, which blocks stand in the tables, and how resets end.

    Not what is in use: kvpool's engine tells the service with its next step what a finished request gives back.
    """
    plain, pooled = pair.outcomes(workload)
    assert [step[:2] for step in pooled["steps"]] == [step[:2] for step in plain["steps"]]
    assert pooled["tables"] == plain["tables"]
    assert pooled["resets"] == plain["resets"]


@cases()
def test_counters_are_the_same(pair: Pair, workload: str) -> None:
    plain, pooled = pair.outcomes(workload)
    assert pooled["counters"] == plain["counters"]


RESERVING = [
    *(pytest.param(name, name, id=name) for name in ("llama", "llama-small")),
    *(pytest.param(name, name, id=name, marks=pytest.mark.complete) for name in ("gemma", "gemma-small", "gemma4")),
]


@pytest.mark.parametrize(("pair", "name"), RESERVING, indirect=["pair"])
def test_with_slots_in_reserve_the_tokens_are_the_same(pair: Pair, name: str, pairs: Pairs) -> None:
    """With small pools, what is evicted may differ, and so what is found.

    Not of models with states: their tokens depend on the sizes of batches, with vLLM alone, too.
    """
    reserving = pairs.with_reserves(name)
    for workload, plain in pair.plain["outcomes"].items():
        outcome = reserving["outcomes"][workload]
        expected, answers = _answers(plain), _answers(outcome)
        assert [answer["token_ids"] for answer in answers] == [answer["token_ids"] for answer in expected]
        if not plain["counters"]["num_preemptions"]:
            assert outcome["counters"] == plain["counters"]


@cases(caching=True)
def test_prefixes_are_found(pair: Pair, workload: str) -> None:
    plain, _ = pair.outcomes(workload)
    assert 0 < plain["counters"]["prefix_cache_hits"] < plain["counters"]["prefix_cache_queries"]
    assert any(answer["num_cached_tokens"] for answer in _answers(plain))


@cases()
def test_tokens_are_of_many_kinds(pair: Pair, workload: str) -> None:
    """A model that says the same whatever it reads would not notice a wrong block."""
    plain, _ = pair.outcomes(workload)
    prompts = {tuple(request.prompt) for request in make_workload(workload).requests}
    answers = {tuple(answer["token_ids"]) for answer in _answers(plain)}
    assert len(answers) > len(prompts) / 2


@cases(*CROWDED)
def test_small_pools_preempt(pair: Pair, workload: str) -> None:
    """Nothing is free but a few blocks: an allocation takes one in each group, or none."""
    plain, _ = pair.outcomes(workload)
    assert plain["counters"]["num_preemptions"] > 10
    assert max(in_use for _, _, in_use in plain["steps"]) > 0.98


@cases("shared prefixes", "batch sizes", "conversations", "long prompts", "crowded", "priorities")
def test_requests_run_to_their_end(pair: Pair, workload: str) -> None:
    plain, _ = pair.outcomes(workload)
    for request, answers in zip(make_workload(workload).requests, plain["requests"], strict=True):
        assert [(len(each["token_ids"]), each["finish_reason"]) for each in answers] == [(request.max_tokens, "length")]


@cases("batch sizes")
def test_batches_are_full(pair: Pair, workload: str) -> None:
    plain, _ = pair.outcomes(workload)
    assert {1, 2, 4, 8, 16, 32, 64} <= {running for running, _, _ in plain["steps"]}


@cases("repeats")
def test_a_repeat_hits_all_but_its_last_token(pair: Pair, workload: str) -> None:
    """Up to the last token at which a block of every group ends."""
    plain, _ = pair.outcomes(workload)
    unit = _hit_unit(pair)
    lengths = [len(request.prompt) for request in make_workload(workload).requests]
    first = len(lengths) // 3
    expected = [(length - 1) // unit * unit for length in lengths]
    assert [answer["num_cached_tokens"] for answer in _answers(plain)] == [0] * first + expected[first:]


@pytest.mark.parametrize("pair", [pytest.param("lfm2-partial", marks=pytest.mark.complete)], indirect=True)
def test_hits_end_within_blocks(pair: Pair) -> None:
    plain, _ = pair.outcomes("chat")
    (size,) = {size for _, size in pair.plain["groups"]}
    assert any((answer["num_cached_tokens"] or 0) % size for answer in _answers(plain)), size


@cases("salts")
def test_tenants_do_not_hit_each_others_prefixes(pair: Pair, workload: str) -> None:
    plain, _ = pair.outcomes(workload)
    found = [answer["num_cached_tokens"] for answer in _answers(plain)]
    first = len(found) // 3
    assert found[:first] == [0] * first
    later = zip(make_workload(workload).requests[first:], found[first:], strict=True)
    assert all(hit for request, hit in later if len(request.prompt) > _hit_unit(pair))


@cases("copies")
def test_copies_have_tokens_of_their_own(pair: Pair, workload: str) -> None:
    plain, _ = pair.outcomes(workload)
    for answers in plain["requests"]:
        assert len({tuple(answer["token_ids"]) for answer in answers}) == 3


@cases("prompt logprobs")
def test_prompts_with_requested_logprobs_are_computed_in_full(pair: Pair, workload: str) -> None:
    plain, _ = pair.outcomes(workload)
    found = [answer["num_cached_tokens"] for answer in _answers(plain)]
    turns = [found[start : start + 3] for start in range(0, 12, 3)]
    assert [any(turn) for turn in turns] == [False, False, True, False]


@cases("aborts", "crowded aborts")
def test_some_are_aborted_and_others_are_not(pair: Pair, workload: str) -> None:
    plain, _ = pair.outcomes(workload)
    requests = make_workload(workload).requests
    ends = [{answer["finish_reason"] for answer in answers} for answers in plain["requests"]]
    assert all(end == {"length"} for request, end in zip(requests, ends, strict=True) if request.aborted is None)
    assert set() in ends  # before it had a token
    assert {None} in ends  # after


@cases("reset")
def test_a_reset_is_refused_or_preempts_all(pair: Pair, workload: str) -> None:
    plain, _ = pair.outcomes(workload)
    assert plain["resets"] == [True, False, True, True]
    assert plain["counters"]["num_preemptions"] > 10


def test_workloads_have_enough_requests() -> None:
    """Of the Llama model, 500."""
    names = [name for engine in ENGINES.values() if engine.model is LLAMA for name in engine.workloads]
    assert sum(len(make_workload(name).requests) for name in names) >= 500


def _hit_unit(pair: Pair) -> int:
    """Tokens of which hits are multiples: a block of every group ends there."""
    return math.lcm(*(block_size for _, block_size in pair.plain["groups"]))


def _answers(outcome: Outcome) -> list[Answer]:
    return [answer for answers in outcome["requests"] for answer in answers]
