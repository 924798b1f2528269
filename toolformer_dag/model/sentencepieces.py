"""Check that transformers reads a sentencepiece model as sentencepiece does; it gives no warning itself."""

from pathlib import Path
from typing import Any

from toolformer_dag.model.weights import ModelError

FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Names of sentencepiece models: of Llama, T5 and NLLB. Llama 3's tokenizer.model is none, but tiktoken's."""
FAST_TOKENIZER = "tokenizer.json"
"""The file of a fast tokenizer. With it nothing is converted, and nothing has to be checked."""
TEXTS = ("the total is 94 + 23 = 117 apples .", "he came ( in 2019 ) -> [ and left", "добрый день , 東京 !")
"""In lower case and without accents: some tokenizers change these before sentencepiece sees the text."""


def check_sentencepiece(name: str, tokenizer: Any, revision: str | None = None) -> None:
    """Raise ModelError where a tokenizer cuts trial texts otherwise than the sentencepiece model that it was read from.

    transformers may convert such a model into a tokenizer of the wrong class, without a warning. Not covered: accents,
    upper case and white space, where some tokenizers differ by design.

    name: folder or hub id; nothing is checked where it has no sentencepiece file.
    """
    file = find_sentencepiece_file(name, revision)
    if file is None:
        return
    model = _load_sentencepiece_model(file)
    if model is None:
        return
    for text in TEXTS:
        tokens = tokenizer.tokenize(text)  # compared by their texts: NLLB gives them other ids
        expected = _split_into_pieces(model, text, unknown=tokenizer.unk_token)
        if tokens != expected:
            raise ModelError(
                f"the tokenizer of {name!r} is read as {type(tokenizer).__name__}, which cuts {text!r} into "
                f"{tokens[:6]}, while {file.name} says {expected[:6]}; write its class into tokenizer_config.json, "
                'such as {"tokenizer_class": "LlamaTokenizer"}, or add the tokenizer.json of the model'
            )


def _load_sentencepiece_model(file: Path) -> Any | None:
    """Read a sentencepiece model; return None for a file of another kind, such as tiktoken's of the same name."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(file))
    except RuntimeError:
        return None


def _split_into_pieces(model: Any, text: str, unknown: str) -> list[str]:
    """Return the texts of the tokens into which a sentencepiece model cuts a text; `unknown` for unknown tokens."""
    pieces = []
    for token_id in model.encode(text):
        pieces.append(unknown if model.is_unknown(token_id) else model.id_to_piece(token_id))
    return pieces


def find_sentencepiece_file(name: str, revision: str | None = None) -> Path | None:
    """Return the sentencepiece file that transformers reads a model's tokenizer from.

    None where the model has no such file, or has a tokenizer.json, which is read instead. name: a folder, or a hub id
    in the hub's cache.
    """
    if _find_model_file(name, FAST_TOKENIZER, revision) is not None:
        return None
    for file_name in FILES:
        file = _find_model_file(name, file_name, revision)
        if file is not None:
            return file
    return None


def _find_model_file(name: str, file_name: str, revision: str | None) -> Path | None:
    """Return a file of a model, in its folder or in the hub's cache; None where it is not there."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        file = folder / file_name
        return file if file.is_file() else None

    from huggingface_hub import try_to_load_from_cache

    cached_file = try_to_load_from_cache(name, file_name, revision=revision)
    return Path(cached_file) if isinstance(cached_file, str) else None
