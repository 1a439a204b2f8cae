"""A process that has taken all its file descriptors."""

import contextlib
import os
import resource
from collections.abc import Iterator

_NUM_FILES = 256


@contextlib.contextmanager
def no_free_files() -> Iterator[None]:
    """No file can be opened in the block, unless a descriptor is closed."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], _NUM_FILES), limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        assert taken
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
