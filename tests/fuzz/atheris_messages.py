"""Hostile messages from a coverage-guided fuzzer: `python tests/fuzz/atheris_messages.py -max_total_time=60`.

Needs the package `atheris`, which has wheels for few machines. libFuzzer's own options are taken.
"""

import asyncio
import logging
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

try:
    import atheris
except ImportError:
    sys.stderr.write("skipped: there is no atheris for this machine\n")
    sys.exit(0)

with atheris.instrument_imports(include=["kvpool.server"]):
    from fuzz.campaign import Campaign
    from fuzz.contract import METHODS

_CHECK_EVERY = 500
_METHODS = list(METHODS.values())

logging.getLogger("kvpool").setLevel(logging.ERROR)


class _Fuzzer:
    """One campaign with libFuzzer's inputs: the call, and bytes to append to a valid message or to send instead."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._campaign = Campaign(1)
        self._loop.run_until_complete(self._campaign.run(500))
        self._num_inputs = 0

    def one(self, data: bytes) -> None:
        """Handles one input."""
        if len(data) < 2:
            return
        method = _METHODS[data[0] % len(_METHODS)]
        message = data[2:]
        if data[1] % 2:
            message = self._loop.run_until_complete(self._written(data[0])) + message
        self._loop.run_until_complete(self._campaign.take(method, message))
        self._num_inputs += 1
        if self._num_inputs % _CHECK_EVERY == 0:
            self._campaign.check()

    async def _written(self, choice: int) -> bytes:
        return self._campaign.message(_METHODS[choice % len(_METHODS)])


def main() -> None:
    """Runs until libFuzzer ends."""
    atheris.Setup(sys.argv, _Fuzzer().one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
