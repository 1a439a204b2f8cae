"""Forks Python programs from a process that has imported what they need; `support.processes` is its client.

An import of torch takes seconds of processor time and that of a server half a second; a fork takes milliseconds. Each
program still runs in a process of its own, as `python PROGRAM`, `python -m MODULE`, `python -c CODE` or `kvpool` runs.

    python -m support.zygote SOCKET MODULE...     the number of a descriptor, and what it imports

A message on the socket is a JSON object: the arguments of `_become` for a program. With it come four file
descriptors: the standard streams of the program, and a pipe that gets its process id and later its exit status. The
zygote ends when its socket is closed; the programs go on, as after `Popen`.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

_MAX_MESSAGE_BYTES = 2**20


def serve(requests: socket.socket) -> Callable[[], None] | None:
    """Starts programs until the socket is closed.

    Returns:
        In each child the program to run; None in the zygote.
    """
    children: dict[int, tuple[int, int]] = {}
    ready = selectors.DefaultSelector()
    ready.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is not requests:
                ready.unregister(key.fd)
                _report(*children.pop(key.fd), key.fd)
                continue
            message, fds, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_BYTES, 4)
            if not message:
                return None
            *standard, status_fd = fds
            pid = os.fork()
            if not pid:
                # A sibling that held the writing end would keep a status pipe open.
                for _, other_fd in children.values():
                    os.close(other_fd)
                os.close(status_fd)
                ready.close()
                requests.close()
                return partial(_become, standard, **json.loads(message))
            for fd in standard:
                os.close(fd)
            os.write(status_fd, f"{pid}\n".encode())
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, status_fd
            ready.register(pidfd, selectors.EVENT_READ)


def _report(pid: int, status_fd: int, pidfd: int) -> None:
    """Reports a child that has ended."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # the test has ended
        os.write(status_fd, f"{status}\n".encode())
    os.close(status_fd)
    os.close(pidfd)


def _become(
    standard: list[int], *, command: list[str], environment: dict[str, str], folder: str, has_session: bool
) -> None:
    """Runs a program as the interpreter would, in a session of its own if it `has_session`."""
    if has_session:
        os.setsid()
    for number, fd in enumerate(standard):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if Path(command[0]).name.startswith("python"):
        del command[0]
    sys.orig_argv[:] = [sys.executable, *command]  # which a server runs again in another role
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    match command:
        case ["-c", code, *arguments]:
            sys.path.insert(0, "")
            sys.argv[:] = ["-c", *arguments]
            exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)  # noqa: S102 - as `python -c`
        case ["-m", module, *arguments]:
            sys.path.insert(0, folder)
            sys.argv[:] = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [program, *_]:
            sys.path.insert(0, str(Path(program).resolve().parent))
            sys.argv[:] = command
            runpy.run_path(program, run_name="__main__")


def main() -> None:
    """Imports, serves, and runs a program in each child."""
    descriptor, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # a collection in a child would copy every page
    with socket.socket(fileno=int(descriptor)) as requests:
        program = serve(requests)
    _leave(program or (lambda: None))  # the zygote, too: freed modules of vLLM print pages about leaks


def _leave(program: Callable[[], None]) -> NoReturn:
    """Runs a program and exits as the interpreter would, but frees nothing: that takes 0.2 s with torch."""
    status = 0
    try:
        program()
    except SystemExit as left:
        match left.code:
            case int() | None:
                status = left.code or 0
            case message:
                sys.stderr.write(f"{message}\n")
                status = 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 - the interpreter prints every error
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
