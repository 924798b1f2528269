"""What changed between two records."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.lake import record as records
from toolformer_dag.lake.record import ABSENT, FieldChange, build_record, get_installed_version, list_record_changes

leaves = st.one_of(st.integers(), st.text(), st.none(), st.booleans())
choices = st.dictionaries(st.sampled_from("abc"), st.one_of(leaves, st.dictionaries(st.sampled_from("de"), leaves)))


def test_changes_are_named_field_by_field_a_person_s_own_first() -> None:
    old = build_record({"model": {"weights": "a", "dtype": "float32"}, "prompt": "p", "k": 5}, {"texts": "1"})
    new = build_record({"model": {"weights": "b", "dtype": "float32"}, "prompt": "p", "m": 5}, {"texts": "2"})
    assert list_record_changes(old, new) == [
        FieldChange("settings.k", 5, ABSENT),
        FieldChange("settings.m", ABSENT, 5),
        FieldChange("settings.model.weights", "a", "b"),
        FieldChange("inputs.texts", "1", "2"),
    ]


def test_commit_versions_and_time_change_nothing() -> None:
    old = build_record({"k": 1}, {})
    assert list_record_changes(old, {**old, "commit": "x", "versions": {}, "written": "now"}) == []


def test_a_package_that_lies_on_the_path_and_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PACKAGES", ("a-package-on-the-path", "polars"))
    records.get_package_versions.cache_clear()
    assert build_record({}, {})["versions"] == {
        "a-package-on-the-path": "not installed",
        "polars": get_installed_version("polars"),
    }
    records.get_package_versions.cache_clear()


def test_a_change_reads_as_one_line() -> None:
    assert str(FieldChange("settings.prompt", "a\nb", "x" * 99)) == f"settings.prompt: a\\nb -> {'x' * 57}..."


@settings(deadline=None)
@given(choices, choices)
def test_there_are_changes_exactly_where_records_differ(one: dict[str, object], other: dict[str, object]) -> None:
    found = list_record_changes(build_record(one, {}), build_record(other, {}))
    assert (found == []) == (_leaves(one) == _leaves(other))
    assert list_record_changes(build_record(one, {}), build_record(one, {})) == []


def _leaves(value: dict[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, item in value.items():
        flat |= {f"{key}.{inner}": leaf for inner, leaf in item.items()} if isinstance(item, dict) else {key: item}
    return flat
