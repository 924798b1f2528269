"""A whole line in markers that are tokens of the tokenizer, from candidates to the checkpoint and `generate`."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from transformers import AutoTokenizer

from tests.conftest import Once
from tests.runs.conftest import World, ended
from tests.worlds import lay_out, make_model
from toolformer_dag.files import unseal_record
from toolformer_dag.model.weights import MARKERS_KEY
from toolformer_dag.settings.call_markers import CallMarkers
from toolformer_dag.texts.calls import parse_placed_calls, remove_calls

pytestmark = pytest.mark.long
SPECIAL = CallMarkers(begin="<tool_call>", arrow="<tool_response>", end="</tool_call>")
IN_SETTINGS = "\n".join(["[model.markers]", *(f'{key} = "{marker}"' for key, marker in SPECIAL), ""])
NAMES = ["Calculator", "Search"]


@pytest.fixture(scope="module")
def marked(once: Once, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose model calls in markers, in which everything ran. Not to be changed."""

    def run(folder: Path) -> None:
        model = make_model(tmp_path_factory.mktemp("marked") / "model", brackets=(SPECIAL.begin, SPECIAL.end))
        world = World(lay_out(folder, model))
        world.edit("[sampling]", f"{IN_SETTINGS}[sampling]")
        ended(world.start("run"))

    return World(once("made-markers", run))


def test_c_star_is_in_the_markers_and_tables_in_the_paper_s_form(marked: World) -> None:
    corpus = marked.sql("select text, text_with_calls, calls from augmented_corpus where calls > 0")
    assert len(corpus) > 3
    for text, with_calls, calls in corpus:
        assert remove_calls(with_calls, NAMES, SPECIAL) == text and "[" not in with_calls
        assert len(parse_placed_calls(with_calls, NAMES, SPECIAL)) == calls
    [(shown,)] = marked.sql("select call from calls where kept limit 1")
    assert str(shown).startswith(" [") and " -> " in str(shown) and str(shown).endswith("]")
    reasons = {reason for [reason] in marked.sql("select distinct reason from candidates")}
    assert None in reasons and "other_tool" in reasons
    inputs = [asked for [asked] in marked.sql("select distinct input from candidates where input is not null")]
    assert len(inputs) > 10 and not any("tool" in str(asked) or "]" in str(asked) for asked in inputs)


def test_the_checkpoint_tells_its_markers_and_generate_and_evaluation_read_them(marked: World, tmp_path: Path) -> None:
    for name in ("finetuned_checkpoint", "baseline_checkpoint"):
        folder = marked.folder / "lake/training" / name / "model"
        assert json.loads((folder / "tokenizer_config.json").read_text())[MARKERS_KEY] == SPECIAL.model_dump()
        assert unseal_record((folder / "training.json").read_bytes())["markers"] == SPECIAL.model_dump()
    card = (marked.folder / "lake/training/finetuned_checkpoint/model/README.md").read_text()
    assert "`<tool_call>Tool(input)<tool_response>`" in card and "`</tool_call>`" in card
    asked = [{"text": f"{a} and {a + 1} make"} for a in range(6)]
    lines = "".join(json.dumps(one) + "\n" for one in asked)
    (tmp_path / "questions.jsonl").write_text(lines)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "toolformer.toml").write_text((marked.folder / "toolformer.toml").read_text().replace(IN_SETTINGS, ""))
    for file in ("sums_tool.py", "calculator.txt", "sums.txt"):
        (plain / file).write_text((marked.folder / file).read_text())
    (plain / "model").symlink_to(marked.folder / "model")
    answers = []
    for folder in (marked.folder, plain):  # the second one's settings have the paper's markers
        checkpoint = str(marked.folder / "lake/training/finetuned_checkpoint/model")
        command = ("generate", str(tmp_path / "questions.jsonl"), "--model", checkpoint, "--max-new-tokens", "20")
        out, _ = ended(World(folder).start(*command, "--k", "3"))
        answers.append([json.loads(line) for line in out.splitlines()])
    assert [one["text"] for one in answers[0]] == [one["text"] for one in answers[1]]
    made = [call for one in answers[0] for call in one["calls"] if call["result"] is not None]
    assert made and all(f"[{call['tool']}({call['input']}) -> {call['result']}]" in str(answers[0]) for call in made)
    assert "tool_call" not in out
    assert marked.sql("select count(*) from outcomes")[0][0] > 0


def test_exports_write_the_markers(marked: World, tmp_path: Path) -> None:
    rows: dict[str, Any] = {}
    for form in ("text", "masked", "preference", "chat"):
        ended(marked.start("export", str(tmp_path / form), "--form", form))
        rows[form] = load_dataset(str(tmp_path / form), cache_dir=str(tmp_path / "cache"))["train"]
    tokenizer = AutoTokenizer.from_pretrained(marked.folder / "model")
    begin, arrow, end = tokenizer.convert_tokens_to_ids([marker for _, marker in SPECIAL])
    texts = {row["plain"]: row for row in rows["text"] if row["calls"]}
    for row in texts.values():
        for call in row["calls"]:
            assert (
                f"<tool_call>{call['name']}({call['input']})<tool_response>{call['result']}</tool_call>" in row["text"]
            )
    masked = [row for row in rows["masked"] if row["calls"]]
    assert {len(row["calls"]) for row in masked} == {row["input_ids"].count(begin) for row in masked}
    for row in masked:
        ids = row["input_ids"]
        labels = row["labels"]
        for at in (at for at, token in enumerate(ids) if token == arrow):
            close = ids.index(end, at)
            assert set(labels[at + 1 : close]) == {-100} and labels[at] == arrow and labels[close] == end
        assert tokenizer.decode(ids).removesuffix("<|end|>") in {row["text"] for row in texts.values()}
    assert all("<tool" not in str(row["messages"]) for row in rows["chat"])
    pairs = list(rows["preference"])
    assert pairs and all(row["rejected"].startswith("<tool_call>") for row in pairs)


def test_other_markers_make_what_they_change_stale_and_nothing_else(marked: World) -> None:
    assert marked.stale() == []
    stale = set(marked.stale('model.markers.end="</call>"'))
    lanes = {f"{lane}/{stage}" for lane in ("calculator", "sums") for stage in ("scored_candidates", "loss_deltas")}
    assert lanes <= stale and {"training/augmented_corpus", "training/finetuned_checkpoint"} <= stale
    assert not [name for name in stale if name.endswith(("raw_shards", "heuristic_subset", "heldout_texts"))]
    why = marked.reasons('model.markers.end="</call>"')
    assert any("markers" in line for line in why["calculator/scored_candidates"]), why
