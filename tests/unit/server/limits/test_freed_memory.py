"""Memory of large messages is used again."""

import subprocess
import sys

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
PAGES = 10 * 3 * 2**24 // 4096


def num_faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, check=True).stdout)


def test_freed_memory_is_not_fetched_from_the_kernel_again() -> None:
    assert num_faults("kept") < PAGES / 20 < PAGES / 2 < num_faults("returned")
