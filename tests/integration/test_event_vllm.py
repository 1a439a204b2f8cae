"""vLLM's own classes decode every published message. docs/how-to/block-events.md says how to install vLLM for it.

The test runs where `import vllm` works, or with the Python interpreter KVPOOL_VLLM_PYTHON. If KVPOOL_VLLM_PATH is set,
that interpreter looks for vLLM in this folder first.
"""

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from support.events import truth
from support.publisher import Site
from support.waiting import until

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
    assert encode(batch) == payload, "differs from what vLLM writes"
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
    """A Python interpreter with vLLM; skips the test if there is none."""
    named = os.environ.get("KVPOOL_VLLM_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed, and KVPOOL_VLLM_PYTHON is not set")
    return sys.executable


async def printed(output: asyncio.StreamReader, word: str) -> str:
    """The rest of the subscriber's next line that begins with a word."""
    while line := (await output.readline()).decode():
        first, _, rest = line.strip().partition(" ")
        if first == word:
            return rest
    pytest.fail("vLLM's process ended: see stderr")


async def test_vllm_decodes_every_message(tmp_path: Path) -> None:
    python = vllm_python()
    place = Site(tmp_path, heartbeat_seconds=0.0)
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
        if await printed(process.stdout, "form") != "map":
            pytest.skip("this vLLM is older than 0.24 and writes events as arrays")
        await printed(process.stdout, "replayed")
        await place.work(30)
        await place.session.reset_prefix_cache()
        await place.work(5)
        await until(lambda: place.publisher._next > place.publisher._log.last_sequence)
        process.stdin.write(f"{place.publisher.counts.messages}\n".encode())
        result = json.loads(await printed(process.stdout, "result"))
        assert {tuple(entry) for entry in result["known"]} == truth(place.pool)
        assert set(result["kinds"]) == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
        assert await process.wait() == 0
    finally:
        if process and process.returncode is None:
            process.kill()
            await process.wait()
        await place.stop()
