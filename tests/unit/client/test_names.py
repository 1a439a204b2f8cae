"""Errors carry the name under which users import them."""

import inspect
import traceback

import pytest

import kvpool.client
from kvpool.client import KvpoolError, NotFoundError, connect

ERRORS = [
    value
    for name in kvpool.client.__all__
    if inspect.isclass(value := getattr(kvpool.client, name)) and issubclass(value, KvpoolError)
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_has_the_name_that_is_imported(error: type[KvpoolError]) -> None:
    assert (error.__module__, getattr(kvpool.client, error.__name__)) == ("kvpool.client", error)


def test_a_traceback_shows_that_name() -> None:
    with connect("embedded:") as client, pytest.raises(NotFoundError) as caught:
        client.get_pool("m")
    assert traceback.format_exception_only(caught.value)[-1].startswith("kvpool.client.NotFoundError: ")


def test_the_types_of_public_attributes_are_exported() -> None:
    assert kvpool.client.PoolConfig.__annotations__["name"] is kvpool.client.PoolName
