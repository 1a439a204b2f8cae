"""Attacks by a token that takes all that it may."""

from contextlib import ExitStack
from dataclasses import replace

from attacks.attack import Assault
from support.server import pool_config

_SCOPES = 500
_BLOCKS = 4_000


def open_scopes(assault: Assault) -> None:
    """Keeps many weights versions of a pool with events in use, and replaces its cached blocks again and again."""
    name, num_tokens = "attacker", 4 * _BLOCKS
    config = replace(pool_config(name, _BLOCKS + _SCOPES + 2, enable_events=True), max_model_len=num_tokens + 1)
    with assault.target.connect(name) as client, ExitStack() as opened:
        client.create_pool(config)
        for i in range(_SCOPES):
            session = opened.enter_context(client.open_session(name))
            session.set_weights_version(f"version {i}")
            assert session.admit(session.request("kept", range(4)))
        number = 0
        while not assault.is_over.is_set():
            number += 1
            request = session.request(str(number), range(number, number + num_tokens))
            assert session.admit(request)
            session.free(request)
