"""Streams of a link, cut anywhere or mutated: they give the frames that were sent, or the documented errors."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

import pytest

from fuzz.mutations import mutate_bytes
from kvpool.core.errors import ExhaustedError, InvalidArgumentError, KvpoolError
from kvpool.server.cluster import messages
from kvpool.server.codec import DamageError
from kvpool.v1 import lending_pb2, step_pb2
from kvpool.v1.link_pb2 import LinkWelcome
from kvpool.wire import link
from kvpool.wire.errors import to_status
from kvpool.wire.frames import HEAD, FrameReader, State, encode_frame
from kvpool.wire.link import Kind
from support.directory import member_of
from support.fake_lender import answer_frame
from support.lending import lend_request, lending_hello
from support.raw_link import steps_hello

Frame = tuple[int, bytes]
SERVER_ID: Final = "server"
MAX_BYTES: Final = 2**20
_REQUESTS: Final = [
    step_pb2.Step(sequence=i, operations=[step_pb2.OPERATION_FREE] * i, request_ids=["r"] * i) for i in range(4)
]
_ANSWERS: Final = [step_pb2.StepResult(sequence=i, block_ids=range(i)) for i in range(4)]
_REFUSED: Final = encode_frame(Kind.REFUSED, to_status(InvalidArgumentError("kind", "x")).SerializeToString())
SIDES: Final[dict[str, tuple[State, list[bytes]]]] = {
    "server": (
        link.server_state(MAX_BYTES, is_probed=True),
        [
            steps_hello(SERVER_ID, "session", "token"),
            *(encode_frame(Kind.REQUEST, each.SerializeToString()) for each in _REQUESTS),
        ],
    ),
    "client": (
        link.client_state(is_probed=True),
        [
            link.welcome(LinkWelcome()),
            *(encode_frame(Kind.ANSWER, each.SerializeToString()) for each in _ANSWERS),
            _REFUSED,
        ],
    ),
    "lender": (
        link.server_state(MAX_BYTES),
        [
            lending_hello("token"),
            lend_request(map=lending_pb2.Map()),
            lend_request(fenced=lending_pb2.LendFenced(fence_sequence=1)),
            lend_request(bind=lending_pb2.Bind(epoch=7, session_number=1)),
        ],
    ),
    "engine": (
        link.client_state(MAX_BYTES, refusal_ends=False),
        [
            link.welcome(LinkWelcome(lending=lending_pb2.LendingOffer(device="cpu"))),
            _REFUSED,
            answer_frame(fence=lending_pb2.LendFence(fence_sequence=1, live_session_numbers=range(9))),
            answer_frame(mapped=lending_pb2.Mapped(epoch=7, memory_id="1")),
            _REFUSED,
            answer_frame(bound=lending_pb2.Bound()),
        ],
    ),
}
"""What each side receives, from the first state on."""
GREETINGS: Final[dict[str, tuple[bytes, Callable[[bytes], object], bytes, Callable[[bytes], object]]]] = {
    "steps": (
        SIDES["server"][1][0],
        partial(link.read_hello, stream="steps", server_id=SERVER_ID),
        SIDES["client"][1][0],
        link.read_welcome,
    ),
    "replication": (
        messages.hello("token", messages.Hello("shard", "core", member_of("standby"), 2, 1, 7)),
        messages.read_hello,
        messages.welcome(messages.Welcome(3, resumes=True, now_seconds=1.5)),
        messages.read_welcome,
    ),
}
"""By stream: hello and welcome, each with the function that reads it."""
_TRIES: Final = 3000


def fed(state: State, chunks: list[bytes]) -> tuple[list[Frame], str]:
    """Feeds chunks. Returns the frames, and the error; empty if there is none."""
    reader, frames = FrameReader(state), list[Frame]()
    for chunk in chunks:
        try:
            frames += reader.feed(chunk)
        except (InvalidArgumentError, ExhaustedError) as error:
            return frames, f"{error.reason}: {error}"
    return frames, ""


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def cut(rng: Random, data: bytes) -> list[bytes]:
    ends = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(4)))
    return [data[begin:end] for begin, end in zip([0, *ends], [*ends, len(data)], strict=True)]


def mutate(rng: Random, frames: list[bytes]) -> bytes:
    """Mutates bytes, a head, or the order of frames."""
    frames = list(frames)
    at = rng.randrange(len(frames))
    num_bytes, kind = HEAD.unpack_from(frames[at])
    match rng.randrange(5):
        case 0:
            frames[at] = HEAD.pack(rng.choice((0, num_bytes + 1, 2**14 + 1, 2**32 - 1)), kind) + frames[at][HEAD.size :]
        case 1:
            frames[at] = HEAD.pack(num_bytes, rng.randrange(256)) + frames[at][HEAD.size :]
        case 2:
            frames.insert(at, rng.choice(frames))
        case 3:
            frames[at] = encode_frame(kind, mutate_bytes(rng, frames[at][HEAD.size :], b""))
        case _:
            return mutate_bytes(rng, b"".join(frames), frames[0])
    return b"".join(frames)


@pytest.mark.parametrize("side", SIDES)
def test_a_stream_that_is_cut_anywhere_gives_the_same_frames(side: str) -> None:
    state, frames = SIDES[side]
    data, sent = b"".join(frames), [(frame[HEAD.size - 1], frame[HEAD.size :]) for frame in frames]
    for at in range(len(data) + 1):
        assert fed(state, [data[:at], data[at:]]) == (sent, "")
    assert fed(state, bytewise(data)) == (sent, "")


@pytest.mark.parametrize("side", SIDES)
def test_a_mutated_stream_gives_frames_that_were_sent_and_then_one_error(side: str) -> None:
    rng, errors = Random(5), set[str]()
    state, frames = SIDES[side]
    for _ in range(_TRIES):
        data = mutate(rng, frames)
        found, error = fed(state, bytewise(data))
        whole = b"".join(encode_frame(*frame) for frame in found)
        assert data.startswith(whole)
        if not error and len(data) - len(whole) >= HEAD.size:
            assert HEAD.unpack_from(data, len(whole))[0] > len(data) - len(whole) - HEAD.size, "it waits for the rest"
        some, same_error = fed(state, cut(rng, data))
        assert (some, same_error) == (found[: len(some)], error)
        assert error or len(some) == len(found)
        errors.add(error.partition(":")[0])
    assert errors == {"", "MALFORMED", "MESSAGE_TOO_LARGE"}


@pytest.mark.parametrize("stream", GREETINGS)
def test_a_mutated_greeting_is_refused_with_a_documented_error_or_accepted(stream: str) -> None:
    rng, reasons = Random(6), set[str]()
    hello, read_hello, welcome, read_welcome = GREETINGS[stream]
    for _ in range(_TRIES):
        try:
            read_hello(mutate_bytes(rng, hello[HEAD.size :], welcome))
            read_welcome(mutate_bytes(rng, welcome[HEAD.size :], hello))
        except KvpoolError as error:
            reasons.add(error.reason)
        except DamageError:
            reasons.add("damage")
        else:
            reasons.add("")
    assert (
        {"", "MALFORMED", "PROTOCOL_VERSION"}
        <= reasons
        <= {"", "MALFORMED", "PROTOCOL_VERSION", "OTHER_SERVER", "damage"}
    )


@pytest.mark.parametrize("torn_bytes", [0, 1000])
def test_a_payload_that_is_announced_takes_no_memory_before_it_arrives(torn_bytes: int) -> None:
    reader = FrameReader(link.client_state(is_probed=True))
    reader.feed(link.welcome(LinkWelcome()))
    tracemalloc.start()
    try:
        assert reader.feed(HEAD.pack(link.MAX_ANSWER_BYTES, Kind.ANSWER) + bytes(torn_bytes)) == []
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()
