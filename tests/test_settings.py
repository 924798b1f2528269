"""Settings: which source wins, and what is refused with the file, the key and the remedy."""

from pathlib import Path
from typing import get_args

import pytest

from tests.test_docs import generator
from toolformer_dag.computing.plan import load_lanes
from toolformer_dag.settings.sections import Settings, SettingsTables
from toolformer_dag.settings.setting_types import SettingsError, SettingsTable
from toolformer_dag.settings.settings_file import PAPER_TOOLS, WrittenSettings, load_settings, resolve_settings_path
from toolformer_dag.settings.tool_settings import ChanceThreshold

VARIABLE = "TOOLFORMER__TOOLS__CALCULATOR__K"
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


def refusal(file, **given):
    with pytest.raises(SettingsError) as error:
        load_settings(file, **{"environment": {}} | given)
    str(error.value).encode()  # a message that no terminal or log refuses
    return str(error.value)


CAPITALS = 'profile = "Fast"\n[tools.Sums]\nk = 1\n[tools.calendar]\n[profiles.Fast.sampling]\nseed = 1\n'
BY_CHANCE = "[tools.calculator]\ntau_f = { by_chance = 0.05 }\n[tools.calendar]\ntau_f = 0.7\n"
TAU_F = "TOOLFORMER__TOOLS__CALCULATOR__TAU_F"
OF_CALENDAR = "TOOLFORMER__TOOLS__CALENDAR__TAU_F"
LOADED = [
    # later sources win: the file over its profile, variables over the file, the command line over all
    (FILE, {}, {"tools.calculator.tau_f": 0.5, "tools.calculator.k": 2, "training.max_steps": 7, "training.seed": 5}),
    (FILE, {TAU_F: "0.6", "TOOLFORMER__MODEL__NAME": "gpt2"}, {"tools.calculator.tau_f": 0.6, "model.name": "gpt2"}),
    (FILE, {TAU_F: "0.6", "--set": "tools.calculator.tau_f=0.8"}, {"tools.calculator.tau_f": 0.8}),
    (CAPITALS, {"TOOLFORMER__TOOLS__SUMS__K": "3"}, {"tools.Sums.k": 3}),
    (CAPITALS, {OF_CALENDAR: "0.4"}, {"tools.calendar.tau_f": 0.4}),
    (CAPITALS, {"TOOLFORMER__PROFILES__FAST__SAMPLING__SEED": "2"}, {"sampling.seed": 2}),
    # a threshold is a number or a table, and the later source wins whole
    (BY_CHANCE, {}, {"tools.calculator.tau_f": ChanceThreshold(by_chance=0.05)}),
    (BY_CHANCE, {"--set": "tools.calculator.tau_f=0.3"}, {"tools.calculator.tau_f": 0.3}),
    (
        BY_CHANCE,
        {"--set": "tools.calculator.tau_f.fallback=1.5"},
        {"tools.calculator.tau_f": ChanceThreshold(by_chance=0.05, fallback=1.5)},
    ),
    (
        BY_CHANCE,
        {"--set": "tools.calendar.tau_f={by_chance=0.1}"},
        {"tools.calendar.tau_f": ChanceThreshold(by_chance=0.1)},
    ),
    (
        BY_CHANCE,
        {f"{OF_CALENDAR}__BY_CHANCE": "0.2"},
        {"tools.calendar.tau_f": ChanceThreshold(by_chance=0.2)},
    ),
    # a name that is no folder is a model's, a list may go over lines, a byte order mark is no part of the file
    *((FILE, {"--set": f"model.name={name}"}, {"model.name": name}) for name in ("gpt2", "x" * 5000)),
    (FILE, {"--set": "corpus.shards=[\n'a',\n'b',\n]\n"}, {"corpus.shards": ("a", "b")}),
    ("\ufeff" + FILE, {}, {"training.max_steps": 7}),
]


@pytest.mark.parametrize(("text", "sources", "values"), LOADED, ids=range(len(LOADED)))
def test_a_value_is_that_of_the_last_source_that_gives_it(file, text, sources, values):
    file.write_text(text, "utf-8")
    environment = {name: value for name, value in sources.items() if name != "--set"}
    overrides = [value for name, value in sources.items() if name == "--set"]
    found = load_settings(file, environment=environment, overrides=overrides)
    for path, value in values.items():
        section, *names, last = path.split(".")
        assert getattr(found.tools[names[0]] if names else getattr(found, section), last) == value, path


@pytest.mark.parametrize(
    ("text", "given", "lanes"),
    [
        (FILE, {}, ["calculator", "calendar"]),  # a profile gives values, and no lane
        (FILE, {"overrides": ["tools.wiki_search.enabled=true"]}, ["calculator", "calendar", "wiki_search"]),
        ("[tools.calendar]\n[tools.calculator]\n", {}, ["calendar", "calculator"]),
        ("", {}, list(PAPER_TOOLS)),
    ],
)
def test_the_lanes_are_those_of_the_file_and_of_the_command_line(file, text, given, lanes):
    file.write_text(text)
    assert list(load_settings(file, environment={}, **given).tools) == lanes


@pytest.mark.parametrize(
    "source",
    [
        {"overrides": ["tools.calculator.tau_f=0.8"], "environment": {}},
        {"environment": {"TOOLFORMER__TOOLS__CALCULATOR__TAU_F": "0.8"}},
    ],
)
def test_a_value_for_one_tool_takes_no_other_away(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    plain = load_settings(environment={}).tools
    tools = load_settings(**source).tools
    assert tuple(tools) == PAPER_TOOLS
    assert {key: section.tau_f for key, section in tools.items() if section != plain[key]} == {"calculator": 0.8}


@pytest.mark.parametrize(
    ("pairs", "key", "value"),
    [
        ([], "paths.lake", "lake"),
        (["paths.lake=~/lake"], "paths.lake", "/home/ada/lake"),
        (["paths.lake='other'"], "paths.warehouse", "other/toolformer.duckdb"),
        (["paths.lake='other'", "paths.warehouse='w.duckdb'"], "paths.warehouse", "w.duckdb"),
        (["model.name=mine"], "model.name", "mine"),
    ],
)
def test_paths_count_from_the_folder_of_the_file(file, monkeypatch, pairs, key, value):
    monkeypatch.setenv("HOME", "/home/ada")
    (file.parent / "mine").mkdir()
    section, _, name = key.partition(".")
    found = getattr(getattr(load_settings(file, environment={}, overrides=pairs), section), name)
    assert Path(found) == file.parent / value


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
        ("tools.calculator.tau_f=[0.5]", ["tools.calculator.tau_f: ", "valid number"]),
        ("tools.calculator.tau_f.by_chance=1.0", ["tools.calculator.tau_f.by_chance: ", "less than 1"]),
        ("tools.calculator.tau_f.by_chance=0", ["tools.calculator.tau_f.by_chance: ", "greater than 0"]),
        ("tools.calculator.tau_f.chance=0.1", ["tau_f.chance: unknown key; did you mean 'by_chance'"]),
        ("tools.calculator.tau_f={fallback=1}", ["tools.calculator.tau_f.by_chance: ", "required"]),
        ("control.swap=2", ["control.swap: unknown key; did you mean 'swaps'"]),
        ("tools.calculator.k=true", ["tools.calculator.k: true and false are no values of this key"]),
        ("sampling.temperature=inf", ["sampling.temperature", "finite number"]),
        (
            "paths.lake=hdfs://host/lake",
            ["paths.lake: hdfs://host/lake is no folder", "write a folder, or s3://bucket"],
        ),
        ("paths.lake=s3:/bucket/lake", ["paths.lake: s3:/bucket/lake is no folder", "or s3://bucket/prefix"]),
        ("paths.warehouse=s3://bucket/w", ["paths.warehouse: s3://bucket/w", "only local folders are supported"]),
        ("paths.lake=~nobody_of_that_name/lake", ["paths.lake: ~nobody_of_that_name/lake", "Write the whole path"]),
        ("profile=nowhere", ["'nowhere'", "known profiles", "embedded"]),
        (
            "tools={calculator={enabled=false}, calendar={enabled=false}}",
            ["no tool is enabled; write `enabled"],
        ),
    ],
)
def test_mistakes_are_named(file, pair, words):
    message = refusal(file, overrides=[pair])
    assert all(word in message for word in words)
    assert message.startswith((str(file), "--set "))


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ({"overrides": ["tools.calculator.k=-1"]}, "--set tools.calculator.k"),
        ({"environment": {VARIABLE: "-1"}}, f"${VARIABLE}"),
        ({"environment": {VARIABLE: "-1"}, "overrides": ["tools.calculator.k=-2"]}, "--set tools.calculator.k"),
        ({"environment": {VARIABLE: "3"}, "overrides": ["tools.calculator=3"]}, "--set tools.calculator"),
        ({"profile": "nowhere"}, "--profile"),
        ({"environment": {"TOOLFORMER__PROFILE": "nowhere"}}, "$TOOLFORMER__PROFILE"),
        ({"shards": ["caf\udce9/*.gz"]}, "--shards: corpus.shards.0: the text is not UTF-8"),
        ({"profile": "caf\udce9"}, "--profile"),
        ({"overrides": ["caf\udce9=1"]}, "--set caf\\udce9"),
    ],
)
def test_a_mistake_is_blamed_on_where_it_was_made(file, given, origin):
    assert refusal(file, **given).startswith(origin)


def test_a_mistake_in_the_file_is_not_blamed_on_a_variable_beside_it(file):
    file.write_text(file.read_text() + "[sampling]\ntop_p = 2\n")
    for environment in ({VARIABLE: "3"}, {"TOOLFORMER__SAMPLING": "{seed = 1}"}):
        assert refusal(file, environment=environment).startswith(f"{file}: ")


def test_repository_file_leaves_the_paper_s_thresholds_to_the_paper_s_profile():
    paper = {"calculator": 0.5, "machine_translation": 0.5}
    settings = load_settings(Path(__file__).parents[1] / "toolformer.toml", profile="gptj", environment={})
    assert {lane.key: lane.tau_f for lane in load_lanes(settings)} == {key: paper.get(key, 1.0) for key in PAPER_TOOLS}


@pytest.mark.parametrize(("profile", "look_ahead"), [("embedded", True), ("gptj", False), ("gpt2", False)])
def test_only_the_paper_s_profiles_let_calls_look_ahead(profile, look_ahead):
    settings = load_settings(Path(__file__).parents[1] / "toolformer.toml", profile=profile, environment={})
    assert {lane.rejects_look_ahead for lane in load_lanes(settings)} == {look_ahead}


LEVELS = 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[model]\nname = "a\\u0000b"', ["model.name", "NUL character"]),
        ('[tools.calculator]\nprompt = "a\\u0000b"', ["tools.calculator.prompt", "NUL character"]),
        ('[corpus]\nshards = ["ok", "a\\u0000b"]', ["corpus.shards.1", "NUL character"]),
        ('[tools.calculator]\n"a\\u0000b" = 1', ["tools.calculator", "NUL character"]),
        ("[model]\nname = 'a\0b'", ["not TOML", "correct that line"]),
        (f"[training]\nmax_steps = {'9' * 5000}", ["not TOML", "digits"]),
        (f"[training]\nmax_steps = {'9' * 4000}", ["training.max_steps", "more than 64 bits"]),
        (f"[training]\nmax_steps = '{'9' * 4000}'", ["training.max_steps", "more than 64 bits"]),
        (f"[tools.calculator]\nedition = {'9' * 4000}", ["tools.calculator.edition", "more than 64 bits"]),
        (f"[tools.calculator]\nedition = {'[' * LEVELS}{']' * LEVELS}", ["nested too deeply"]),
        (f"[tools.calculator]\nedition = {'[' * 50}{']' * 50}", ["tools", "nested too deeply"]),
        (f"[{'.'.join('a' * LEVELS)}]\nk = 1", ["nested too deeply"]),
        (f"[tools.calculator]\n{'.'.join('a' * LEVELS)} = 1", ["tools", "nested too deeply"]),
    ],
)
def test_a_file_that_toml_allows_and_nothing_else_holds_is_refused(tmp_path, text, words):
    file = tmp_path / "toolformer.toml"
    file.write_text(text)
    message = refusal(file)
    assert message.startswith(str(file))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.name", "a\0b", ["NUL character"]),
        ("training.max_steps", "9" * 5000, ["training.max_steps", "correct the value"]),
        ("tools.calculator.tau_f", "9" * 5000, ["tools.calculator.tau_f", "finite number"]),
        ("training.max_steps", "9" * 4000, ["training.max_steps", "more than 64 bits"]),
        ("training.learning_rate", "9" * 4000, ["training.learning_rate", "more than 64 bits"]),
        ("training.more_seeds", "[1, 1]", ["1 is there twice"]),
        ("training.more_seeds", "[0]", ["0 is there twice"]),
        (".".join("a" * LEVELS), "1", ["1000 parts"]),
        ("tools.calculator.edition", "[" * LEVELS + "]" * LEVELS, ["nested too deeply"]),
        ("tools.calculator.edition", "{a=" * 50 + "1" + "}" * 50, ["nested too deeply"]),
        ("sampling.seed", "1\nb=2", ["more than one line"]),
        ("model.name", "gpt2\nb=2", ["more than one line"]),
        ("sampling.seed", "1\n[training]\nmax_steps=2", ["more than one line"]),
        ("paths.lake", "caf\udce9", ["paths.lake", "not UTF-8"]),
        ("model.name", "caf\udce9", ["model.name", "not UTF-8"]),
        ("sampling..seed", "1", ["a part of the key is empty"]),
    ],
)
def test_an_override_and_a_variable_of_that_kind_are_refused(file, key, value, words):
    message = refusal(file, overrides=[f"{key}={value}"])
    assert message.startswith(f"--set {key}: ")
    assert all(word in message for word in words), message
    variable = "TOOLFORMER__" + key.upper().replace(".", "__")
    message = refusal(file, environment={variable: value})
    assert message.startswith(f"${variable}: ")
    assert all(word.lower() in message.lower() for word in words), message


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("toolformer.toml", "[tools\n", "not TOML"),
        ("other.toml", None, "no such file"),
        ("caf\udce9/toolformer.toml", "[tools.calculator]\n", "caf\\udce9/toolformer.toml: the path is not UTF-8"),
        *((name, None, "name") for name in ("x" * 5000, "a\0b", ".")),
    ],
    ids=["no TOML", "missing", "not UTF-8", "long", "NUL", "folder"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, path, text, words):
    if text is not None:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        assert words in refusal(None, environment={"TOOLFORMER_CONFIG": str(tmp_path / path)})
    assert words in refusal(tmp_path / path)


def test_a_tilde_in_the_variable_of_the_file_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_settings_path(None, {"TOOLFORMER_CONFIG": "~/mine.toml"}) == tmp_path / "mine.toml"


def described(table: type[SettingsTable]):
    for name, field in table.model_fields.items():
        yield f"{table.__name__}.{name}", field.description
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, SettingsTable):
                yield from described(kind)


def test_every_setting_has_a_description_of_whole_sentences():
    found = dict(described(WrittenSettings)) | dict(described(Settings))
    assert {"ToolLimits.retries", "SmallWebSettings.seed", "SettingsTables.paths"} <= found.keys()
    wrong = [name for name, text in found.items() if not (text and text.endswith(".") and len(text) > 10)]
    assert wrong == []


def test_the_reference_lists_every_key_with_its_default_and_whether_it_enters_fingerprints():
    reference = generator().settings_reference()
    for name, _ in described(SettingsTables):
        key = name.partition(".")[2]
        assert f"| `{key}` |" in reference or f"{key}]`" in reference or f"{key}.NAME]`" in reference
    rows = {line.partition(" | ")[0]: line for line in reference.splitlines()}
    assert rows["| `profile`"].endswith("| no |")
    assert rows["| `learning_rate`"].startswith("| `learning_rate` | number > 0 | `1e-05` | Peak")
    assert rows["| `learning_rate`"].endswith("| yes |")
    assert rows["| `workers`"].endswith("| no |")
    assert rows["| `dtype`"].startswith('| `dtype` | "auto", "float32", "bfloat16" or "float16" | `"auto"` |')
