"""A file system in memory of a certain size, for tests that run as root."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@contextmanager
def small_file_system(size_bytes: int) -> Iterator[Path]:
    """Mounts the file system; skips the test where this process may not."""
    with TemporaryDirectory() as folder:
        options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "small", folder]
        if subprocess.run(["/usr/bin/mount", *options], check=False, capture_output=True).returncode:
            pytest.skip("this process may not mount file systems")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["/usr/bin/umount", "--lazy", folder], check=True)
