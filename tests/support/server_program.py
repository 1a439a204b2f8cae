"""`kvpool` for tests: `python -m support.server_program serve ...` has fault points, and settings without options.

The environment variable KVPOOL_FAULTS arms the points; see `support.faults`. KVPOOL_SETTINGS holds attributes of
`ServerConfig` as JSON, `max_files`, the maximum number of open files, and `retry_seconds`, the time between attempts to
begin a journal again.
"""

import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from kvpool.cli import main
from kvpool.server import app
from kvpool.server.config import ServerConfig
from kvpool.server.journal import folder, journal
from support import faults


def _configured(config: ServerConfig, settings: dict[str, Any]) -> ServerConfig:
    """Replaces attributes of a configuration, and of those in it."""
    auth = settings.get("auth", {})
    auth.update({name: Path(path) for name, path in auth.items()})
    changed = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in settings.items()
    }
    return replace(config, **changed)


def _main() -> None:
    armed = faults.ArmedFaults(os.environ.get(faults.VARIABLE, ""))
    settings = json.loads(os.environ.get("KVPOOL_SETTINGS", "{}"))
    if max_files := settings.pop("max_files", 0):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files // 2, max_files))
    mock.patch.object(journal, "RETRY_SECONDS", settings.pop("retry_seconds", journal.RETRY_SECONDS)).start()
    serve = app.serve

    def serve_configured(config: ServerConfig, ready: Any) -> Any:
        return serve(_configured(config, settings), ready, armed)

    write_frame = armed.in_halves(folder.write_whole)
    with mock.patch.object(app, "serve", serve_configured), mock.patch.object(folder, "write_whole", write_frame):
        main()


if __name__ == "__main__":
    _main()
