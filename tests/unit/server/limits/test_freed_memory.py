"""Memory of large messages is used again."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from kvpool.server.limits.freed_memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for number in range(12):
    if number == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    copies = [b"x" * 2**24 for _ in range(3)]
    del copies
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
COLLECTED = """
import gc, sys
from kvpool.server.limits.freed_memory import collect_old_garbage_rarely

if sys.argv[1] == "rarely":
    collect_old_garbage_rarely()
before = gc.get_stats()[2]["collections"]
for _ in range(50):
    churned = [[] for _ in range(20_000)]
print(gc.get_stats()[2]["collections"] - before)
"""
RETURNED = """
import asyncio, random, sys
from kvpool.core.memory_probe import resident_bytes
from kvpool.server.limits import freed_memory
from kvpool.wire.backoff import Backoff

async def main() -> None:
    freed_memory.Backoff = lambda *_, **__: Backoff(0.01, 0.01)
    freed_memory.keep_freed_memory()
    if sys.argv[2] == "glibc":
        parts = [bytearray(2**15) for _ in range(2**11)]  # 64 MiB
        pin = bytearray(2**15)  # glibc returns nothing below it by itself
    else:
        parts = [(bytes(440),) for _ in range(2**17)]  # 64 MiB
        random.shuffle(parts)  # so that freed tuples which Python keeps lie in all of it
    full = resident_bytes()
    task = asyncio.create_task(freed_memory.return_freed_memory(int(full / float(sys.argv[1]))))
    del parts
    for _ in range(500):
        if resident_bytes() < full - 2**25:
            break
        await asyncio.sleep(0.01)
    print(full - resident_bytes(), task.done())

asyncio.run(main())
"""
"""Arguments: the share of the maximum that is resident, and what keeps freed memory."""
PAGES = 10 * 3 * 2**24 // 4096


def num_faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, check=True).stdout)


def test_freed_memory_is_not_fetched_from_the_kernel_again() -> None:
    assert num_faults("kept") < PAGES / 20 < PAGES / 2 < num_faults("returned")


@pytest.mark.parametrize("keeper", ["glibc", "python"])
@pytest.mark.parametrize(("share", "is_returned"), [("0.9", True), ("0.6", False)])
def test_freed_memory_is_returned_when_most_of_the_maximum_is_resident(
    share: str, keeper: str, *, is_returned: bool
) -> None:
    done = subprocess.run([sys.executable, "-c", RETURNED, share, keeper], capture_output=True, check=True, text=True)
    num_bytes, has_ended = done.stdout.split()
    assert (int(num_bytes) > 2**25, has_ended) == (is_returned, "False")


def test_full_collections_of_garbage_are_rare() -> None:
    often, rarely = (
        int(subprocess.check_output([sys.executable, "-c", COLLECTED, how], timeout=60)) for how in ("often", "rarely")
    )
    assert 5 * rarely < often
