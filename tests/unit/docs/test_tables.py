"""The tables that the build of the site makes from the code."""

import re

import pytest

from docs.tables import MARK, TABLES
from kvpool.wire.log_fields import FIELDS
from support.logs import logged_events
from support.pages import PAGES


def test_pages_name_all_tables_and_no_others() -> None:
    named = [name for page in PAGES for name in MARK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(TABLES)


@pytest.mark.parametrize("name", sorted(TABLES.keys() - {"benchmarks"}))
def test_a_table_has_rows_of_equal_lengths(name: str) -> None:
    rows = [re.findall(r"(?<=\| )(?:[^|]*)(?= \|)", line) for line in TABLES[name]().splitlines()]
    assert len(rows) > 8
    assert {len(row) for row in rows} == {len(rows[0])}
    assert all(row[0] and row[-1].count("`") % 2 == 0 for row in rows)


def test_benchmarks_have_a_table_for_each_subject() -> None:
    assert TABLES["benchmarks"]().count("\n### ") > 5


def test_fields_of_events_are_those_of_the_formatter() -> None:
    events = logged_events().values()
    assert len(events) > 100
    assert set().union(*(event.fields for event in events)) == set(FIELDS)
    assert len(FIELDS) == len(set(FIELDS))
