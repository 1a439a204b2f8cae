"""Every message that is published, decoded by vLLM's own classes; see docs/how-to/block-events.md for how to have a vLLM here.

Runs where `import vllm` works, or with the Python that KVPOOL_VLLM_PYTHON names, which looks for it in the folder
KVPOOL_VLLM_PATH first, if that is set.
"""

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from kvpool.server.events.config import EventForm
from support.events import truth
from support.publisher import Site, until

SUBSCRIBER = """
import json, sys
import msgspec, zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch

form = "array" if KVCacheEvent.__struct_config__.array_like else "map"
print("form", form, flush=True)  # vLLM logs here too
decode, encode = msgspec.msgpack.Decoder(type=KVEventBatch).decode, msgspec.msgpack.Encoder().encode
context = zmq.Context()
live = context.socket(zmq.SUB)
live.connect(sys.argv[1])
live.setsockopt_string(zmq.SUBSCRIBE, "kv@m")
replay = context.socket(zmq.DEALER)
replay.connect(sys.argv[2])
known, kinds, next_sequence = set(), {}, 0


def take(sequence, payload):
    global next_sequence
    if sequence < next_sequence:
        return
    assert sequence == next_sequence, (sequence, next_sequence)
    next_sequence += 1
    batch = decode(payload)
    assert form == "array" or encode(batch) == payload, "not what vLLM itself writes"
    assert batch.data_parallel_rank == 0
    for event in batch.events:
        name = type(event).__name__
        kinds[name] = kinds.get(name, 0) + 1
        group = getattr(event, "group_idx", 0) or 0
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            assert event.medium == "GPU"
            known.update((group, block_hash) for block_hash in event.block_hashes)
        elif isinstance(event, BlockRemoved):
            known.difference_update((group, block_hash) for block_hash in event.block_hashes)
        else:
            assert isinstance(event, AllBlocksCleared)
            known.clear()


replay.send_multipart((b"", (0).to_bytes(8, "big")))
while True:
    _, topic, sequence, payload = replay.recv_multipart()
    if not payload:
        assert (topic, sequence) == (b"", (-1).to_bytes(8, "big", signed=True))
        break
    assert topic == b"kv@m@m"
    take(int.from_bytes(sequence, "big"), payload)
print("replayed", flush=True)
end = int(sys.stdin.readline())
while next_sequence < end:
    _, sequence, payload = live.recv_multipart()
    take(int.from_bytes(sequence, "big"), payload)
print("result", json.dumps({"kinds": kinds, "known": sorted(known)}), flush=True)
"""


def vllm_python() -> str:
    """A Python that has vLLM, or a skip that says why there is none."""
    named = os.environ.get("KVPOOL_VLLM_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here, and KVPOOL_VLLM_PYTHON names no Python that has it")
    return sys.executable


async def told(output: asyncio.StreamReader, word: str) -> str:
    """What the subscriber says after this word, at the begin of a line."""
    while line := (await output.readline()).decode():
        first, _, rest = line.strip().partition(" ")
        if first == word:
            return rest
    pytest.fail("vLLM's process ended: see stderr")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("form", EventForm)
async def test_every_message_is_what_vllm_decodes(form: EventForm, tmp_path: Path) -> None:
    python = vllm_python()
    place = Site(tmp_path, form=form, heartbeat_seconds=0.0)
    await place.start()
    process = None
    try:
        await place.work(30)
        arguments = ("-c", SUBSCRIBER, place.events.endpoint, place.events.replay_endpoint)
        pipe = asyncio.subprocess.PIPE
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PYTHONPATH"] = os.environ.get("KVPOOL_VLLM_PATH", "")
        process = await asyncio.create_subprocess_exec(
            python, *arguments, stdin=pipe, stdout=pipe, env=environment, cwd=tmp_path
        )
        assert process.stdin
        assert process.stdout
        theirs = await told(process.stdout, "form")
        if theirs != form:
            pytest.skip(f"this vLLM writes events as {theirs}, not {form}")
        await told(process.stdout, "replayed")
        await place.work(30)
        await place.session.reset_prefix_cache()
        await place.work(5)
        await until(lambda: place.publisher._next > place.publisher._log.last_sequence)
        process.stdin.write(f"{place.publisher.num_published}\n".encode())
        result = json.loads(await told(process.stdout, "result"))
        assert {tuple(entry) for entry in result["known"]} == truth(place.pool)
        assert set(result["kinds"]) == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
        assert await process.wait() == 0
    finally:
        if process and process.returncode is None:
            process.kill()
            await process.wait()
        await place.stop()
