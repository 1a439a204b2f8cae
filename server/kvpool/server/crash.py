"""Ends the process after a bug, so that nothing continues with half a change.

A handler that tried to undo the change would run on the state that the bug has damaged. The next process recovers the
state before the change from the journal, as after a kill.
"""

import logging
import os
from typing import Final, NoReturn

EXIT_STATUS: Final = 70
"""EX_SOFTWARE of sysexits.h: an internal error."""


def crash() -> NoReturn:
    """Ends the process at once. The caller has logged why."""
    logging.shutdown()  # writes that record
    os._exit(EXIT_STATUS)
