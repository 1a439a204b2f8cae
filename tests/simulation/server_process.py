"""The real server on the simulated network; its journal, if enabled, is in real files."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpool.core.ranks.messages import RankTiming
from kvpool.server.app import Server
from kvpool.server.config import ServerConfig
from kvpool.server.journal import journal as journal_module
from kvpool.server.journal.config import JournalConfig
from kvpool.server.journal.folder import write_whole


class Killed(BaseException):
    """Raised where a process is killed in the middle of an action."""


@dataclass(slots=True)
class ServerSettings:
    """Settings of a server process.

    Attributes:
        address: Listening address.
        rank_timing: Time limits for ranks.
        folder: Folder of the journal; None for no journal.
    """

    address: str
    rank_timing: RankTiming
    folder: Path | None


class ServerProcess:
    """One process of the server.

    Attributes:
        server: The server, for the checks.
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
            past_epoch=int(asyncio.get_running_loop().time() * 1000),  # like `kvpool serve`, which uses seconds
        )
        self.server = Server(config)
        await self.server.start()

    @property
    def dropped(self) -> str:
        """Reason why the journal was dropped; empty if it was not."""
        journal = self.server._journal if self.server else None
        return journal.recovery.detail if journal and journal.recovery.dropped else ""

    def close_files(self) -> None:
        """Closes files as the kernel does for a killed process."""
        journal = self.server._journal if self.server else None
        if journal:
            journal.is_recording = False
            journal._close_log()
            journal._folder.close()


def tear_next_write(share: float, kill: Callable[[], None]) -> None:
    """Kills the server in the middle of the next frame that it writes to its journal.

    Args:
        share: Share of the frame that is written, in [0, 1].
        kill: Kills the server.
    """

    def tear(descriptor: int, content: bytes) -> None:
        write_well()
        os.write(descriptor, content[: round(share * len(content))])
        kill()
        raise Killed

    vars(journal_module)["write_whole"] = tear


def write_well() -> None:
    """Undoes `tear_next_write`."""
    vars(journal_module)["write_whole"] = write_whole
