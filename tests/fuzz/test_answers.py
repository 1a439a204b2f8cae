"""Malformed answers of a server, to a session and to a rank.

A corrupted result of a step either raises ServerError, with nothing changed and the step still without an answer; or it
is well formed, and gives only blocks that exist.
"""

from copy import deepcopy
from random import Random

import pytest
from google.protobuf.message import DecodeError

from fuzz.configs import CONFIGS
from fuzz.mutations import mutate_bytes, mutate_fields
from kvpool.client import Client, PoolConfig, Session, WrongStateError
from kvpool.client.blocking import run
from kvpool.client.request import Request
from kvpool.client.step_builder import StepBuilder
from kvpool.client.transports.embedded import EmbeddedTransport
from kvpool.core.errors import KvpoolError
from kvpool.core.steps.columns import Step, StepResult
from kvpool.gpu_worker.rank_protocol import RankProtocol
from kvpool.lending.fence import Fence
from kvpool.v1 import step_pb2, worker_pb2
from kvpool.wire.errors import ServerError
from kvpool.wire.ranks import server_message_from_proto
from kvpool.wire.steps import result_from_proto, result_to_proto
from support.rank_server import degraded, planned, ready, registered
from support.ranks import registration

_ROUNDS = 300
_CONFIGS = [config for config in CONFIGS if config.enable_caching and config.hash_scheme.algorithm != "fuzz"]


class CorruptingTransport(EmbeddedTransport):
    """The core in this process, whose results can be corrupted."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.is_corrupting = False
        self._rng = rng

    async def apply(self, session_id: str, step: Step) -> StepResult:
        result = await super().apply(session_id, step)
        return self._corrupt(result) if self.is_corrupting else result

    def _corrupt(self, result: StepResult) -> StepResult:
        while True:
            message = result_to_proto(result)
            if self._rng.random() < 0.7:
                mutate_fields(self._rng, message)
                return result_from_proto(message)
            try:
                data = mutate_bytes(self._rng, message.SerializeToString(), b"")
                return result_from_proto(step_pb2.StepResult.FromString(data))
            except DecodeError:  # grpc's client would refuse it
                continue


def _ask(rng: Random, step: StepBuilder, session: Session, requests: list[Request]) -> None:
    """A step of a scheduler: one request is added, some continue, some are freed."""
    for request in list(requests):
        chance = rng.random()
        if chance < 0.15 or len(requests) > 6:
            requests.remove(request)
            step.free(request)
        elif request.num_computed_tokens:
            request.append([rng.randrange(100)])
            step.allocate_slots(request, 1)
        else:
            step.admit(request)
    requests.append(session.request(f"q{rng.random()}", [rng.randrange(3), *range(rng.randrange(1, 30))]))
    step.admit(requests[-1], num_lookahead_tokens=rng.choice((0, 3)))
    if rng.random() < 0.2:
        step.evict_blocks([1, 2])
    if rng.random() < 0.2 and requests[0].declared and step.can_name(requests[:1]):
        step.get_common_prefix_blocks(requests[0])


def _view(session: Session, requests: list[Request]) -> object:
    return session.sequence, [(repr(r), deepcopy(r.block_ids), r.declared, r.num_sent_tokens) for r in requests]


@pytest.mark.parametrize("config", _CONFIGS, ids=lambda config: str(config.name))
def test_a_malformed_result_raises_server_error_and_changes_nothing(config: PoolConfig) -> None:
    rng = Random(3)
    transport = CorruptingTransport(rng)
    run(transport.create_pool(config))
    session, requests = Client(transport).open_session(config.name), list[Request]()
    num_refused = 0
    for _ in range(_ROUNDS):
        step = session.new_step()
        _ask(rng, step, session, requests)
        before = _view(session, requests)
        transport.is_corrupting = rng.random() < 0.8
        try:
            session.send(step)
        except ServerError:
            assert _view(session, requests) == before
            with pytest.raises(WrongStateError, match="settle"):
                session.free(requests[0])
            num_refused += 1
            transport.is_corrupting = False
            session.settle()
        if transport.is_corrupting:  # the result was well formed
            assert all(0 <= i < config.num_blocks for r in requests for table in r.block_ids for i in table)
            transport.close_session(session.session_id)
            session, requests = Client(transport).open_session(config.name), []
    assert num_refused > _ROUNDS / 4


def test_a_rank_handles_the_messages_of_a_hostile_server() -> None:
    rng = Random(4)
    written = [registered(), planned(1, 20), ready(1, 20), degraded(2, 0, 1), planned(2, 9), ready(2, 9)]
    written.append(worker_pb2.JoinResponse(fence=worker_pb2.Fence(fence_sequence=1, epoch=1, live_session_numbers=[1])))
    rank, now_seconds, num_handled = RankProtocol(registration(), ("h:1",), Fence(), draw=rng.random), 0.0, 0
    for _ in range(20_000):
        now_seconds += rng.choice((0.0, 0.01, 1.0))
        message = worker_pb2.JoinResponse()
        message.CopyFrom(rng.choice(written))
        if rng.random() < 0.5:
            mutate_fields(rng, message)
        data = message.SerializeToString()
        if rng.random() < 0.3:
            data = mutate_bytes(rng, data, rng.choice(written).SerializeToString())
        try:
            received = server_message_from_proto(worker_pb2.JoinResponse.FromString(data))
        except DecodeError:  # grpc's client refuses it
            continue
        except KvpoolError as error:
            rank.stream_ended(error, now_seconds)
        else:
            if received is not None:
                rank.received(received, now_seconds)
                num_handled += 1
        rank.tick(now_seconds)
        if rank.is_over:
            rank = RankProtocol(registration(), ("h:1",), Fence(), draw=rng.random)
    assert num_handled > 1000
