"""Named points in the server's code at which a test can make the process fail.

The product passes these points, and `FaultPoints` does nothing at them. Tests give the server a subclass
(`tests/support/faults.py`) that kills, stops or delays the process, or raises OSError.
"""

from typing import Final


class FaultPoints:
    """Fault points of a server in production: reaching one has no effect."""

    __slots__ = ()

    def reach(self, point: str) -> None:
        """Passes a point.

        Raises:
            OSError: A test armed the point to fail.
        """


NO_FAULTS: Final = FaultPoints()
"""The default of every argument that takes fault points."""
