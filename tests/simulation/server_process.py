"""The server as it is started, on the simulated network; its journal, if it has one, is real files."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpool.core.ranks.messages import RankTiming
from kvpool.server.app import Server
from kvpool.server.config import JournalConfig, ServerConfig
from kvpool.server.journal import journal as journal_module
from kvpool.server.journal.folder import write_whole


class Killed(BaseException):
    """Ends what a process was at when it was killed in the middle of it."""


@dataclass(slots=True)
class ServerSettings:
    """What a server process is started with.

    Attributes:
        address: Where it listens.
        rank_timing: How long ranks are waited for.
        folder: Where its journal is; None for no journal.
    """

    address: str
    rank_timing: RankTiming
    folder: Path | None


class ServerProcess:
    """One process of the server.

    Attributes:
        server: The server; what the checks look at.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.server: Server | None = None

    async def main(self) -> None:
        """Serves until it is killed."""
        folder = str(self._settings.folder or "")
        config = ServerConfig(
            addresses=(self._settings.address,),
            rank_timing=self._settings.rank_timing,
            journal=JournalConfig(folder),
            past_epoch=int(asyncio.get_running_loop().time() * 1000),  # as `kvpool serve`, which counts seconds
        )
        self.server = Server(config)
        await self.server.start()

    @property
    def dropped(self) -> str:
        """Why the journal that it found was not trusted; empty if it was."""
        journal = self.server._journal if self.server else None
        return journal.recovery.detail if journal and journal.recovery.dropped else ""

    def close_files(self) -> None:
        """Does what a kernel does with the files of a process that was killed."""
        journal = self.server._journal if self.server else None
        if journal:
            journal.allocator.sink = None
            journal._close_log()
            journal._folder.close()


def tear_next_write(share: float, kill: Callable[[], None]) -> None:
    """Has the server killed in the middle of the next frame that it writes to its journal.

    Args:
        share: How much of the frame is still written, [0, 1].
        kill: Kills it.
    """

    def tear(descriptor: int, content: bytes) -> None:
        write_well()
        os.write(descriptor, content[: round(share * len(content))])
        kill()
        raise Killed

    vars(journal_module)["write_whole"] = tear


def write_well() -> None:
    """Takes `tear_next_write` back."""
    vars(journal_module)["write_whole"] = write_whole
