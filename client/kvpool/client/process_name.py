"""The name by which an operator finds a process."""

import os
import socket
import sys
from pathlib import Path
from typing import Final

_MAX_CHARACTERS: Final = 64
"""Maximum length of a program's name."""


def process_name(program: str = "") -> str:
    """Returns `PROGRAM@HOST:PID` of this process. Without `program`, the name of the script that runs."""
    if not program and sys.argv:
        program = Path(sys.argv[0]).name
    return f"{program[:_MAX_CHARACTERS] or 'python'}@{socket.gethostname()}:{os.getpid()}"
