"""Errors carry what a transport needs, and nothing else."""

import pytest

from kvpool.core import errors
from kvpool.core.errors import InvalidArgumentError, KvpoolError, WrongStateError, check_range


def test_an_error_names_its_field_before_its_message() -> None:
    error = InvalidArgumentError("sequence", "missing")
    assert (str(error), error.message, error.field, error.reason) == (
        "sequence: missing", "missing", "sequence", "INVALID_VALUE",
    )  # fmt: skip
    assert str(WrongStateError("DRAINING", "not now")) == "not now"


def test_a_field_can_be_renamed_for_the_caller() -> None:
    error = InvalidArgumentError("request_ids[0]", "too long")
    error.rename_field("request.request_id")
    assert (str(error), error.field) == ("request.request_id: too long", "request.request_id")


@pytest.mark.parametrize("value", [0, 3])
def test_ranges_include_both_ends(value: int) -> None:
    assert check_range("f", value, 0, 3) == value


@pytest.mark.parametrize("value", [-1, 4])
def test_values_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"f: {value} is not in \[0, 3\]"):
        check_range("f", value, 0, 3)


def test_an_integrity_error_is_not_a_kvpool_error() -> None:
    assert not issubclass(errors.IntegrityError, KvpoolError)
