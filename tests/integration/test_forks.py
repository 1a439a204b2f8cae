"""A process that is forked from one with a connection: its calls are refused at once, and disturb nothing."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.server import running_server

_SYNC = """
import os, sys, warnings
warnings.simplefilter("ignore")
from kvpool.client import KvpoolError, connect
from kvpool.client.admin import AdminClient
from support.server import pool_config
client, admin = connect(sys.argv[1]), AdminClient(sys.argv[1])
client.create_pool(pool_config("sync", enable_events=True))
session = client.open_session("sync")
request = session.request("r", range(5))
session.admit(request)
watch = client.watch("sync", from_sequence=1)
next(watch)
def decode():
    with session.step() as step:
        step.decode([request], [7])
def begin():
    with session.begin_step() as step:
        step.preempt(request)
child = os.fork()
if not child:
    calls = (decode, begin, session.mark_executed, session.pool, session.close,
        lambda: client.get_pool("sync"), lambda: client.watch("sync"), lambda: next(watch), admin.overview)
    for call in calls:
        try:
            call()
        except KvpoolError as error:
            print(type(error).__name__, error.reason, "connect()" in str(error), flush=True)
    admin.close()
    client.close()
    os._exit(0)
os.waitpid(child, 0)
decode()
session.free(request)
session.close()
print("parent", admin.overview().pools[0].free_blocks)
"""

_ASYNC = """
import asyncio, os, sys, warnings
warnings.simplefilter("ignore")
from kvpool.client import KvpoolError, aio
from support.server import pool_config
async def main():
    client = aio.connect(sys.argv[1])
    await client.create_pool(pool_config("async"))
    session = await client.open_session("async")
    request = session.request("r", range(5))
    await session.admit(request)
    child = os.fork()
    if not child:
        calls = (lambda: session.preempt(request), session.close, lambda: client.get_pool("async"),
            lambda: anext(client.watch("async")))
        for call in calls:
            try:
                await call()
            except KvpoolError as error:
                print(type(error).__name__, error.reason, "connect()" in str(error), flush=True)
        await client.close()
        os._exit(0)
    os.waitpid(child, 0)
    await session.free(request)
    await session.close()
    print("parent", (await client.get_pool("async")).free_blocks)
    await client.close()
asyncio.run(main())
"""

_EMBEDDED = """
import os, sys
from kvpool.client import connect
from support.server import pool_config
client = connect("embedded:")
client.create_pool(pool_config())
session = client.open_session("m")
request = session.request("r", range(5))
session.admit(request)
child = os.fork()
session.free(request)
if not child:
    print("child", session.pool().free_blocks, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent", session.pool().free_blocks)
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server() as address:
        yield address


def output(program: str, address: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # gRPC's own handlers crash now and then
    command = [sys.executable, "-c", program, address]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("program", "num_calls"), [(_SYNC, 9), (_ASYNC, 4)], ids=["sync", "asyncio"])
def test_a_forked_process_cannot_use_the_connection(address: str, program: str, num_calls: int) -> None:
    assert output(program, address) == ["WrongStateError FORKED True"] * num_calls + ["parent 99"]


def test_a_forked_process_owns_a_copy_of_an_embedded_core(address: str) -> None:
    assert output(_EMBEDDED, address) == ["child 99", "parent 99"]
