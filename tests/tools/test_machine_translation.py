"""Machine translation: NLLB's traps on a tiny checkpoint, language identification, and the embedded dictionary."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from tests.tools.nllb_checkpoint import PAIRS, write_checkpoint
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.language_identifier import Identifier, IdentifierError, get_identifier_path, to_flores_code
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDown

FOREIGN = [foreign for _, foreign, _ in PAIRS]
ENGLISH = [english for _, _, english in PAIRS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("nllb")))


@pytest.fixture(scope="module")
def tool(checkpoint: str) -> Iterator[Tool]:
    yield load_tool("machine_translation", {"model": checkpoint})


def answers(tool: Tool, inputs: list[str]) -> list[str | None]:
    return [result.result or result.reason for result in tool.run([ToolCall(text) for text in inputs])]


def test_a_batch_of_several_languages_is_translated_in_order_as_each_text_alone(tool: Tool) -> None:
    assert answers(tool, FOREIGN) == ENGLISH
    assert answers(tool, FOREIGN[::-1] + FOREIGN[:1]) == ENGLISH[::-1] + ENGLISH[:1]
    assert [answers(tool, [text])[0] for text in FOREIGN] == ENGLISH
    assert answers(tool, [f'"{FOREIGN[0]}"', f"“{FOREIGN[1]}”"]) == ENGLISH[:2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no_words"),
        ("1994 - 2011 !", "no_words"),
        ("This is a plain English sentence about the weather.", "already_english"),
        ("Nemo enim ipsam voluptatem quia voluptas sit aspernatur aut odit aut fugit.", "unknown_language"),
        ("Der kleine Hund schläft heute. " * 40, "input_too_long"),
    ],
)
def test_what_cannot_be_translated_has_a_reason_and_harms_no_neighbour(tool: Tool, text: str, reason: str) -> None:
    assert answers(tool, [FOREIGN[0], text, FOREIGN[1]]) == [ENGLISH[0], reason, ENGLISH[1]]


def test_the_translation_is_bounded(checkpoint: str) -> None:
    short = load_tool("machine_translation", {"model": checkpoint, "max_output_tokens": 4})
    [english] = answers(short, FOREIGN[:1])
    assert english is not None
    assert ENGLISH[0].startswith(english)
    assert english != ENGLISH[0]


def test_a_vocabulary_that_was_not_read_is_refused(checkpoint: str, tmp_path: Path) -> None:
    from transformers import NllbTokenizer

    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    NllbTokenizer(vocab_file="sentencepiece.bpe.model").save_pretrained(tmp_path)
    with pytest.raises(ToolDown, match=r"tokenizer\.json"):
        run_calls(load_tool("machine_translation", {"model": str(tmp_path)}), [ToolCall(FOREIGN[0])], ToolLimits())


def test_a_folder_that_is_no_model_stops_the_lane(tmp_path: Path) -> None:
    with pytest.raises(ToolDown, match=r"tools\.machine_translation.*tokenizer\.json"):
        run_calls(load_tool("machine_translation", {"model": str(tmp_path)}), [ToolCall(FOREIGN[0])], ToolLimits())


def test_every_derived_code_is_one_of_nllb_or_refused_by_its_tokenizer() -> None:
    labels = [label.removeprefix("__label__") for label in Identifier(None).model.predict("", k=-1, threshold=-1.0)[0]]
    known = {label: to_flores_code(label) for label in labels if to_flores_code(label) in FAIRSEQ_LANGUAGE_CODES}
    assert len(known) == 117
    assert len(set(known.values())) == 116  # Croatian and Serbo-Croatian share one
    wanted = {
        "ar": "arb_Arab",
        "fa": "pes_Arab",
        "no": "nob_Latn",
        "sq": "als_Latn",
        "zh": "zho_Hans",
        "de": "deu_Latn",
    }
    assert {label: known[label] for label in wanted} == wanted
    assert "la" not in known
    assert "als" not in known  # Alemannic, not Tosk Albanian


def test_identification_reads_what_fasttext_refuses() -> None:
    found = Identifier(None).identify_languages(["Der kleine Hund\nschläft heute auf dem Sofa.", ""])
    assert found[0].label == "de"
    assert 0.8 < found[0].confidence <= 1.01
    assert Identifier(None).identify_languages([]) == []


def test_a_file_that_is_no_identifier_is_named(tmp_path: Path) -> None:
    (tmp_path / "lid.bin").write_bytes(b"nothing")
    with pytest.raises(IdentifierError, match=r"lid\.bin"):
        Identifier(tmp_path / "lid.bin").identify_languages(["a"])
    with pytest.raises(IdentifierError, match=r"gone\.bin"):
        Identifier(tmp_path / "gone.bin").compute_file_hash()


def test_identity_follows_weights_identifier_and_lengths_not_places(checkpoint: str, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "m")
    (tmp_path / "lid.ftz").write_bytes(get_identifier_path(None).read_bytes())
    here = load_tool("machine_translation", {"model": checkpoint}).identity()
    there = {"model": "m", "identifier": "lid.ftz", "device": "cpu"}
    assert load_tool("machine_translation", there, root=tmp_path).identity() == here
    assert load_tool("machine_translation", {**there, "max_output_tokens": 5}, root=tmp_path).identity() != here
    (tmp_path / "lid.ftz").write_bytes(b"another")
    assert load_tool("machine_translation", there, root=tmp_path).identity() != here


def test_int8_agrees_with_the_checkpoint_it_comes_from(checkpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2", reason="the optional extra ctranslate2 is not installed")
    from ctranslate2.converters import TransformersConverter

    converter = TransformersConverter(checkpoint, copy_files=["tokenizer.json", "tokenizer_config.json"])
    converter.convert(str(tmp_path / "int8"), quantization="int8")
    tool = load_tool(
        "machine_translation", {"backend": "ctranslate2", "model": str(tmp_path / "int8"), "device": "cpu"}
    )
    assert answers(tool, [*FOREIGN, "Nothing but English words here."]) == [*ENGLISH, "already_english"]
    assert "model.bin" in str(tool.identity())


def test_a_folder_that_was_not_converted_is_refused(checkpoint: str) -> None:
    with pytest.raises(ToolDown, match="ct2-transformers-converter"):
        run_calls(
            load_tool("machine_translation", {"backend": "ctranslate2", "model": checkpoint}),
            [ToolCall(FOREIGN[0])],
            ToolLimits(),
        )


def test_the_embedded_backend_translates_phrases_of_the_made_world() -> None:
    tool = load_tool("machine_translation", {"backend": "embedded"})
    assert answers(tool, ["no such words", "", "?"]) == ["unknown_phrase"] * 3
    assert answers(tool, ['el rey"', "¿el rey?", "« le vent »", "la fleur propre."]) == [
        *["the king"] * 2,
        "the wind",
        "the clean flower",
    ]
    assert tool.identity()["backend"] == "embedded"
