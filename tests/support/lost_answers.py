"""A TCP link that can lose everything that a server sends, while requests still reach it."""

import contextlib
from collections.abc import AsyncIterator

from support.workers import Network


class LostAnswers(Network):
    """The link; see `Network`."""

    def lose_answers(self) -> None:
        """Loses what the server sends from now on."""
        self.cut_to_client()


@contextlib.asynccontextmanager
async def lost_answers(target: str) -> AsyncIterator[LostAnswers]:
    """Links a free port of this machine with a server."""
    with contextlib.closing(LostAnswers(target)) as link:
        yield link
