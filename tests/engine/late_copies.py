"""A worker that makes copies in the background as late as it may, and reports them as made at once."""

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from kvpool.client.vllm import worker
from kvpool.lending.host_copies import HostCopies
from kvpool.lending.steps_in_flight import DeviceEvent


class LateCopies(HostCopies):
    """Makes the copies of `begin` when they are joined."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._late: deque[list[tuple[int, int]]] = deque()
        self._num_begun = 0

    @property
    def num_made(self) -> int:
        """Number of batches that have begun."""
        return self._num_begun

    def begin(self, copies: Iterable[tuple[int, int]]) -> DeviceEvent:
        self._num_begun += 1
        self._late.append([*copies])
        sys.stderr.write("copies are made late\n")
        return _Batch(self, self._num_begun)

    def join(self, num_batches: int) -> None:
        while self._late and self._num_begun - len(self._late) < num_batches:
            self.make(self._late.popleft())

    def wait(self) -> None:
        self.join(self._num_begun)


class _Batch:
    def __init__(self, copies: LateCopies, number: int) -> None:
        self._copies, self._number = copies, number

    def query(self) -> bool:
        return self._copies._num_begun - len(self._copies._late) >= self._number

    def synchronize(self) -> None:
        self._copies.join(self._number)


class LateWorker(worker.Worker):
    """An engine's worker."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with patch.object(worker, "HostCopies", LateCopies):
            super().initialize_from_config(kv_cache_config)
