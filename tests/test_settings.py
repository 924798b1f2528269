"""Settings: which source wins, and what is refused with the file, the key and the remedy."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.lane import lanes
from toolformer_dag.settings.load import load_settings
from toolformer_dag.settings.sources import BUILT_IN_TOOLS, SettingsError, merge

FILE = """
profile = "small"
[tools.calculator]
tau_f = 0.5
[tools.calendar]
[training]
max_steps = 7
[profiles.small.tools.calculator]
tau_f = 0.1
k = 2
[profiles.small.tools.wiki_search]
k = 9
[profiles.small.training]
max_steps = 3
seed = 5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "toolformer.toml"
    path.write_text(FILE)
    return path


def test_later_sources_win(file):
    plain = load_settings(file, environment={})
    assert (plain.tools["calculator"].tau_f, plain.tools["calculator"].k) == (0.5, 2)
    assert (plain.training.max_steps, plain.training.seed) == (7, 5)
    environment = {"TOOLFORMER__TOOLS__CALCULATOR__TAU_F": "0.6", "TOOLFORMER__MODEL__NAME": "gpt2"}
    assert load_settings(file, environment=environment).tools["calculator"].tau_f == 0.6
    assert load_settings(file, environment=environment).model.name == "gpt2"
    overridden = load_settings(file, environment=environment, overrides=["tools.calculator.tau_f=0.8"])
    assert overridden.tools["calculator"].tau_f == 0.8


def test_a_variable_reaches_names_with_capitals(tmp_path):
    file = tmp_path / "toolformer.toml"
    file.write_text('profile = "Fast"\n[tools.Sums]\nk = 1\n[tools.calendar]\n[profiles.Fast.sampling]\nseed = 1\n')
    environment = {"TOOLFORMER__TOOLS__SUMS__K": "3", "TOOLFORMER__PROFILES__FAST__SAMPLING__SEED": "2"}
    found = load_settings(file, environment=environment | {"TOOLFORMER__TOOLS__CALENDAR__K": "4"})
    assert {key: lane.k for key, lane in found.tools.items()} == {"Sums": 3, "calendar": 4}
    assert found.sampling.seed == 2


def test_profile_gives_values_and_adds_no_lane(file):
    assert list(load_settings(file, environment={}).tools) == ["calculator", "calendar"]


def test_without_a_file_the_five_tools_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tuple(load_settings(environment={}).tools) == BUILT_IN_TOOLS


@pytest.mark.parametrize(
    "source",
    [
        {"overrides": ["tools.calculator.tau_f=0.8"], "environment": {}},
        {"environment": {"TOOLFORMER__TOOLS__CALCULATOR__TAU_F": "0.8"}},
    ],
)
def test_a_value_for_one_tool_takes_no_other_away(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    plain, tools = load_settings(environment={}).tools, load_settings(**source).tools
    assert tuple(tools) == BUILT_IN_TOOLS
    assert {key: section.tau_f for key, section in tools.items() if section != plain[key]} == {"calculator": 0.8}


def test_a_lane_of_the_command_line_stands_beside_those_of_the_file(file):
    tools = load_settings(file, environment={}, overrides=["tools.wiki_search.enabled=true"]).tools
    assert (set(tools), tools["wiki_search"].k) == ({"calculator", "calendar", "wiki_search"}, 9)


def test_shards_are_taken_as_they_are(file):
    assert load_settings(file, environment={}, shards=["/tmp/o'b/*.gz"]).corpus.shards == ("/tmp/o'b/*.gz",)


def test_home_is_where_a_tilde_points(file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    paths = load_settings(file, environment={}, overrides=["paths.lake=~/lake"]).paths
    assert paths.lake == Path("/home/ada/lake")


def test_paths_count_from_the_folder_of_the_file(file):
    assert load_settings(file, environment={}).paths.lake == file.parent / "lake"


def test_the_warehouse_lies_in_the_lake_unless_it_is_given(file):
    plain = load_settings(file, environment={}, overrides=["paths.lake='other'"]).paths
    assert plain.warehouse == file.parent / "other" / "toolformer.duckdb"
    given = load_settings(file, environment={}, overrides=["paths.lake='other'", "paths.warehouse='w.duckdb'"]).paths
    assert given.warehouse == file.parent / "w.duckdb"


def test_model_folder_counts_from_the_folder_of_the_file(file):
    (file.parent / "mine").mkdir()
    named = {name: load_settings(file, environment={}, overrides=[f"model.name={name}"]) for name in ("mine", "gpt2")}
    assert {name: settings.model.name for name, settings in named.items()} == {
        "mine": str(file.parent / "mine"),
        "gpt2": "gpt2",
    }


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("tols.calculator.k=3", ["tols", "did you mean 'tools'"]),
        ("training.batchsize=3", ["training.batchsize", "did you mean 'batch_size'"]),
        ("training.zzz=3", ["training.zzz", "known keys", "batch_size"]),
        ("training.max_steps=0", ["training.max_steps", "greater than or equal to 1", "correct the value"]),
        ("execution.workers=0", ["execution.workers", "greater than or equal to 1"]),
        ("tools.calculator.tau_s=2.0", ["tools.calculator.tau_s", "less than or equal to 1"]),
        ("tools.calculator.k", ["key.path=value"]),
        ("tools.calculator.limits.timeout=5", ["limits.timeout: unknown key; did you mean 'timeout_s'"]),
        ("tools.calculator.limits.timeout_s=1e12", ["limits.timeout_s: ", "less than or equal to 86400"]),
        ("tools.calculator.limits.zzz=5", ["known keys: backoff_s, concurrency, max_result_characters"]),
        ("tools.calculator=5", ["tools.calculator: must be a table; write [tools.calculator]"]),
        ("tools.my-sums.k=5", ["tools.my-sums: a lane's name has letters, digits and _", "rename the section"]),
        ("tools.warehouse.k=5", ["tools.warehouse: ", "is none of ccnet, training, evaluation, warehouse"]),
        ("tools=5", ["tools: must be a table; write [tools]"]),
        ("profiles=5", ["profiles: must be a table"]),
        ("profile=['a']", ["profile: ", "valid string", "correct the value"]),
        ("profiles.embedded=5", ["profiles.embedded: must be a table; write [profiles.embedded]"]),
        ("profiles.embedded.tools=5", ["profiles.embedded.tools: must be a table"]),
        ("profiles.embedded.tools.calculater.k=5", ["tools.calculater: there is no such lane", "mean 'calculator'"]),
        ("profiles.mine.modell.name=x", ["profiles.mine.modell: unknown key; did you mean 'model'"]),
        ("profiles.mine.training.steps=5", ["profiles.mine.training.steps: unknown key; did you mean 'max_steps'"]),
        ("root=/x", ["root: unknown key"]),
        ("tools.calculator.tau_f=nan", ["tools.calculator.tau_f", "finite number"]),
        ("tools.calculator.tau_f=inf", ["tools.calculator.tau_f", "finite number"]),
        ("tools.calculator.tau_f=true", ["tools.calculator.tau_f: true and false are no values of this key"]),
        ("tools.calculator.k=true", ["tools.calculator.k: true and false are no values of this key"]),
        ("sampling.temperature=inf", ["sampling.temperature", "finite number"]),
        ("paths.lake=s3://bucket/lake", ["paths.lake: s3://bucket/lake", "only local folders are supported"]),
        ("paths.lake=~nobody_of_that_name/lake", ["paths.lake: ~nobody_of_that_name/lake", "Write the whole path"]),
        ("profile=nowhere", ["'nowhere'", "known profiles", "embedded"]),
    ],
)
def test_mistakes_are_named(file, pair, words):
    with pytest.raises(SettingsError) as error:
        load_settings(file, environment={}, overrides=[pair])
    assert all(word in str(error.value) for word in words)
    assert str(error.value).startswith((str(file), "--set "))


def test_a_mistake_is_blamed_on_where_it_was_made(file):
    def blamed(**given):
        with pytest.raises(SettingsError) as error:
            load_settings(file, **{"environment": {}} | given)
        return str(error.value).partition(": ")[0]

    variable = "TOOLFORMER__TOOLS__CALCULATOR__K"
    assert blamed(overrides=["tools.calculator.k=-1"]) == "--set tools.calculator.k"
    assert blamed(environment={variable: "-1"}) == f"${variable}"
    assert blamed(environment={variable: "-1"}, overrides=["tools.calculator.k=-2"]) == "--set tools.calculator.k"
    assert blamed(environment={variable: "3"}, overrides=["tools.calculator=3"]) == "--set tools.calculator"
    file.write_text(file.read_text() + "[sampling]\nseed = 'x'\n")
    assert blamed(environment={variable: "3"}) == str(file)


def test_broken_and_missing_files_are_named(tmp_path):
    broken = tmp_path / "toolformer.toml"
    broken.write_text("[tools\n")
    with pytest.raises(SettingsError, match="not TOML"):
        load_settings(broken, environment={})
    with pytest.raises(SettingsError, match="no such file"):
        load_settings(tmp_path / "other.toml", environment={})


def test_a_byte_order_mark_is_no_part_of_the_file(file):
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_settings(file, environment={}).training.max_steps == 7


def test_no_enabled_tool_is_refused(file):
    pairs = ["tools.calculator.enabled=false", "tools.calendar.enabled=false"]
    with pytest.raises(SettingsError, match=r"no tool is enabled; write `enabled = true` under \[tools.calculator\]"):
        load_settings(file, environment={}, overrides=pairs)


tables = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda values: st.dictionaries(st.sampled_from("abc"), values, max_size=3),
    max_leaves=8,
)
table = st.dictionaries(st.sampled_from("abc"), tables, max_size=3)


@settings(deadline=None)
@given(table, table)
def test_merge_keeps_every_leaf_of_the_upper_table(under, over):
    def leaves(values, path=()):
        for key, value in values.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, (*path, key))
            elif not isinstance(value, dict):
                yield (*path, key), value

    merged = dict(leaves(merge(under, over)))
    assert all(merged[path] == value for path, value in leaves(over))


def test_repository_file_is_valid():
    repository = Path(__file__).parents[1] / "toolformer.toml"
    settings = load_settings(repository, environment=dict.fromkeys(os.environ.keys() & {"HOME"}, ""))
    assert tuple(settings.tools) == BUILT_IN_TOOLS


def test_repository_file_leaves_the_paper_s_thresholds_to_the_paper_s_profile():
    paper = {"calculator": 0.5, "machine_translation": 0.5}
    settings = load_settings(Path(__file__).parents[1] / "toolformer.toml", profile="gptj", environment={})
    assert {lane.key: lane.tau_f for lane in lanes(settings)} == {key: paper.get(key, 1.0) for key in BUILT_IN_TOOLS}
