"""Folders with a sentencepiece model alone, as Llama's, T5's and NLLB's: read as sentencepiece does, or refused.

`tests/environments/test_installations.py` runs this file in environments of its own, made by pip and by uv.
"""

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from toolformer_dag.model.loading import load_encoding
from toolformer_dag.model.sentencepieces import TRIAL_TEXTS
from toolformer_dag.model.weights import ModelError, read_model_identity
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.tools.language_identifier import ENGLISH_FLORES_CODE
from toolformer_dag.tools.options import PretrainedOptions, load_tokenizer
from toolformer_dag.tools.translators import encode_texts, load_nllb_tokenizer

LINES = [
    "The total is 94 + 23 = 117 apples . [Calculator(94 + 23) -> 117] and 5 - 6 = 8 .",
    "He came (in 2019) -> [ and left ; A sentence of English words .",
    "добрый день , 東京 ! Der kleine Hund schläft heute .",
] * 20
SPECIAL = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 450},
    "t5": {"model_type": "unigram", "unk_id": 2, "eos_id": 1, "pad_id": 0, "bos_id": -1, "vocab_size": 120},
    "nllb": {"model_type": "bpe", "vocab_size": 250},
}
FILES = {"llama": "tokenizer.model", "t5": "spiece.model", "nllb": "sentencepiece.bpe.model"}
CLASSES = {"llama": "LlamaTokenizer", "t5": "T5Tokenizer", "nllb": "NllbTokenizer"}
Folder = Callable[..., tuple[Path, SentencePieceProcessor]]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Make a folder of a kind with its sentencepiece model, config.json and, with `named`, the tokenizer's class."""

    def make(kind: str, model_type: str, named: bool = True) -> tuple[Path, SentencePieceProcessor]:
        made = tmp_path / kind
        made.mkdir()
        prefix = made / FILES[kind].removesuffix(".model")
        options = {"model_prefix": str(prefix), "hard_vocab_limit": False, "minloglevel": 2, **SPECIAL[kind]}
        SentencePieceTrainer.train(sentence_iterator=iter(LINES), **options)
        prefix.with_name(f"{prefix.name}.vocab").unlink()
        (made / "config.json").write_text(json.dumps({"model_type": model_type}))
        if named:
            (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": CLASSES[kind]}))
        return made, SentencePieceProcessor(model_file=str(made / FILES[kind]))

    return make


def test_llama_is_read_as_sentencepiece_reads_it(folder: Folder) -> None:
    made, own = folder("llama", "llama")
    encoding = load_encoding(ModelSettings(name=str(made)))
    for text in (*TRIAL_TEXTS, *LINES[:3], "Ada had 17 apples ."):
        assert encoding.tokenizer(text, add_special_tokens=False).input_ids == own.encode(text)
    assert encoding.encode_texts(["The total is 117 ."])[0].token_ids == own.encode("The total is 117 .")


def test_t5_is_read_as_sentencepiece_reads_it_with_or_without_its_class(folder: Folder) -> None:
    made, own = folder("t5", "t5", named=False)
    tokenizer = load_tokenizer("AutoTokenizer", PretrainedOptions(model=str(made)))
    for text in (*TRIAL_TEXTS, *LINES[:3], "a  b\nc ☃"):
        assert tokenizer(text, add_special_tokens=False).input_ids == own.encode(text)


@pytest.mark.parametrize("listed", [False, True])
def test_nllb_knows_words_and_languages(folder: Folder, listed: bool) -> None:
    made, own = folder("nllb", "m2m_100")
    if listed:
        told = {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": list(FAIRSEQ_LANGUAGE_CODES)}
        (made / "tokenizer_config.json").write_text(json.dumps(told))
    tokenizer = load_nllb_tokenizer(PretrainedOptions(model=str(made)))
    [ids] = encode_texts(tokenizer, ["A sentence of English words ."], [ENGLISH_FLORES_CODE])
    assert tokenizer.convert_ids_to_tokens(ids)[1:-1] == own.encode("A sentence of English words .", out_type=str)
    codes = own.get_piece_size() + 1  # the checkpoints' ids: 256,001 for ace_Arab, 256,203 for <mask>
    ace_arab, last, mask = tokenizer.convert_tokens_to_ids(["ace_Arab", "zul_Latn", "<mask>"])
    assert (ace_arab, last, mask) == (codes, codes + 201, codes + 202) and len(tokenizer) == codes + 203
    assert ids[0] == codes + FAIRSEQ_LANGUAGE_CODES.index(ENGLISH_FLORES_CODE)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2"])
def test_a_folder_that_does_not_say_how_to_read_its_model_is_refused(folder: Folder, model_type: str) -> None:
    """transformers would take it for another kind of tokenizer, whose ids differ, and say nothing."""
    made, _ = folder("llama", model_type, named=False)
    with pytest.raises(ModelError, match=r"while tokenizer\.model says .*tokenizer_class"):
        load_encoding(ModelSettings(name=str(made)))


def test_with_a_tokenizer_json_that_file_is_what_counts(folder: Folder, tmp_path: Path) -> None:
    made, own = folder("llama", "llama")
    load_encoding(ModelSettings(name=str(made))).tokenizer.save_pretrained(tmp_path / "saved")
    (made / FILES["llama"]).rename(tmp_path / "saved" / FILES["llama"])
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "llama"}')
    assert load_encoding(ModelSettings(name=str(tmp_path / "saved"))).tokenizer(
        "the total", add_special_tokens=False
    ).input_ids == own.encode("the total")


def test_tiktoken_s_file_of_the_same_name_is_named_with_what_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # nothing that the library needs brings it
    ranks = [base64.b64encode(bytes([byte])) + f" {byte}".encode() for byte in range(256)]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(ranks))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="tiktoken"):
        load_encoding(ModelSettings(name=str(tmp_path)))


@pytest.mark.parametrize("kind", ["llama", "t5", "nllb"])
def test_the_sentencepiece_model_counts_in_the_identity(folder: Folder, kind: str) -> None:
    made, _ = folder(kind, "llama", named=False)
    (made / "model.safetensors").write_bytes(b"weights")
    before = read_model_identity(str(made))
    with (made / FILES[kind]).open("ab") as stream:
        stream.write(b"\0")
    assert read_model_identity(str(made)) != before
