"""The core rests on the standard library alone, and so does nothing but decide."""

import ast
import sys
from pathlib import Path

import kvpool.server.core

ALLOWED = sys.stdlib_module_names - {"asyncio", "time", "os", "socket", "threading", "random", "secrets"}


def test_core_imports_the_standard_library_only() -> None:
    (folder,) = kvpool.server.core.__path__
    paths = sorted(Path(folder).glob("*.py"))
    assert len(paths) > 10
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            for name in names:
                assert name.startswith("kvpool.server.core") or name.partition(".")[0] in ALLOWED, (path.name, name)
