"""A rank runs what follows on what it knows, and refuses all else without touching anything."""

from dataclasses import replace

import pytest
import torch

from examples.reference_engine.config import ReferenceConfig
from examples.reference_engine.dense import DenseModel
from examples.reference_engine.step import RequestStep, StepInput
from kvpool.core.errors import AbortedError, InvalidArgumentError, KvpoolError, NotFoundError
from support.reference import EPOCH, LEASE, LIMITS, NUM_BLOCKS, Rank, RunningRequest

CPU = torch.device("cpu")
PROMPT = [5, 3, 9, 1, 1, 7]


@pytest.fixture
def rank() -> Rank:
    return Rank(ReferenceConfig("sliding"), CPU)


def good(rank: Rank) -> RequestStep:
    return RunningRequest(rank, "r", PROMPT).schedule(4)


def refused(rank: Rank, step: StepInput) -> KvpoolError:
    """The error; checks that all bytes are as they were, and that the rank goes on as if nothing had been asked."""
    before, rows = [buffer.clone() for buffer in rank.buffers], repr(rank.runner)
    with pytest.raises(KvpoolError) as caught:
        rank.runner.execute(step)
    assert all(torch.equal(buffer, saved) for buffer, saved in zip(rank.buffers, before, strict=True))
    assert repr(rank.runner) == rows
    return caught.value


def test_a_step_of_another_epoch_touches_no_tensor(rank: Rank) -> None:
    step = StepInput(replace(LEASE, epoch=EPOCH - 1), "s", [good(rank)])
    error = refused(rank, step)
    assert isinstance(error, AbortedError)
    assert (error.reason, str(error)) == (
        "EPOCH_PASSED",
        "epoch: the step was planned in epoch 2, the rank's blocks are of epoch 3",
    )
    step.lease = LEASE
    assert rank.runner.execute(step) == []  # two tokens of the prompt are left


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_scheduled_tokens": 0}, "num_scheduled_tokens"),
        ({"num_scheduled_tokens": 7}, "num_scheduled_tokens"),
        ({"num_computed_tokens": 3}, "num_scheduled_tokens"),
        ({"num_scheduled_tokens": 5}, "new_block_ids"),
        ({"new_block_ids": [[1], [2]]}, "new_block_ids"),
        ({"new_block_ids": [[1], [2], []]}, "new_block_ids"),
        ({"new_block_ids": [[1], [2], [NUM_BLOCKS]]}, "new_block_ids"),
        ({"new_block_ids": [[1], [2], [-1]]}, "new_block_ids"),
        ({"new_token_ids": [1] * (LIMITS.max_model_len + 1)}, "num_tokens"),
        ({"num_scheduled_tokens": 49, "new_token_ids": [1] * 60}, "num_scheduled_tokens"),
    ],
)
def test_a_malformed_request_is_refused(rank: Rank, change: dict[str, object], field: str) -> None:
    changed = replace(good(rank), **change)  # type: ignore[arg-type]
    error = refused(rank, StepInput(LEASE, "s", [changed]))
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field


def test_requests_that_are_not_running_are_refused(rank: Rank) -> None:
    unknown = replace(good(rank), is_new=False)
    assert isinstance(refused(rank, StepInput(LEASE, "s", [unknown])), NotFoundError)
    request = RunningRequest(rank, "r", PROMPT)
    rank.step(request.schedule(4))
    following = request.schedule(2)
    assert isinstance(refused(rank, StepInput(LEASE, "other", [following])), NotFoundError)
    assert isinstance(refused(rank, StepInput(LEASE, "s", [following], ["r"])), NotFoundError)
    assert isinstance(refused(rank, StepInput(LEASE, "s", [following, following])), InvalidArgumentError)
    assert len(rank.step(following)) == 1


def test_the_number_of_rows_is_limited(rank: Rank) -> None:
    requests = [RunningRequest(rank, f"r{i}", PROMPT) for i in range(LIMITS.max_num_reqs + 1)]
    steps = [request.schedule(6) for request in requests]
    rank.step(*steps[:-1])
    assert refused(rank, StepInput(LEASE, "s", [steps[-1]])).field == "requests"
    rank.step(steps[-1], released=["r3"])  # its row is free by then


def test_sessions_have_their_own_requests_of_one_name(rank: Rank) -> None:
    dense = DenseModel(ReferenceConfig("sliding"), CPU)
    ours, theirs = RunningRequest(rank, "r", PROMPT), RunningRequest(rank, "r", [8] * 6)
    rank.step(ours.schedule(3), session="ours")
    rank.step(theirs.schedule(5), session="theirs")
    assert rank.step(ours.schedule(3), session="ours") == dense.greedy_tokens(PROMPT, 6)
    rank.runner.end_session("ours")
    assert repr(rank.runner) == f"<ModelRunner: 1 requests, epoch {EPOCH}>"
    assert rank.step(theirs.schedule(1), session="theirs") == dense.greedy_tokens([8] * 6, 6)


def test_a_restarted_request_replaces_its_row(rank: Rank) -> None:
    dense = DenseModel(ReferenceConfig("sliding"), CPU)
    rank.step(RunningRequest(rank, "r", [2] * 30).schedule(30))
    assert rank.step(RunningRequest(rank, "r", PROMPT).schedule(6)) == dense.greedy_tokens(PROMPT, 6)
    assert repr(rank.runner) == f"<ModelRunner: 1 requests, epoch {EPOCH}>"


def test_a_step_may_only_release(rank: Rank) -> None:
    rank.step(good(rank))
    assert rank.step(released=["r", "never seen"]) == []
    assert repr(rank.runner) == f"<ModelRunner: 0 requests, epoch {EPOCH}>"
