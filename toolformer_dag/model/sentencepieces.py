"""Check that transformers reads a sentencepiece model as sentencepiece does; it gives no warning itself."""

from pathlib import Path
from typing import Any

from toolformer_dag.model.weights import ModelError

FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Names of sentencepiece models: of Llama, T5 and NLLB. Llama 3's tokenizer.model is none, but tiktoken's."""
OWN = "tokenizer.json"
"""With this file nothing is converted, and nothing has to be checked."""
TEXTS = ("the total is 94 + 23 = 117 apples .", "he came ( in 2019 ) -> [ and left", "добрый день , 東京 !")
"""In lower case and without accents: some tokenizers change these before sentencepiece sees the text."""


def check_sentencepiece(name: str, tokenizer: Any, revision: str | None = None) -> None:
    """Raise ModelError where a tokenizer cuts texts otherwise than the sentencepiece model that it was read from.

    `name`: folder or hub id. Compares pieces, because NLLB gives them other ids. Not covered: accents, upper case and
    white space, where some tokenizers differ from their model by design.
    """
    file = sentencepiece_file(name, revision)
    if file is None:
        return
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(file))
    except RuntimeError:  # tiktoken's file of the same name
        return
    for text in TEXTS:
        read, pieces = tokenizer.tokenize(text), model.encode(text)
        own = [tokenizer.unk_token if model.is_unknown(piece) else model.id_to_piece(piece) for piece in pieces]
        if own != read:
            raise ModelError(
                f"the tokenizer of {name!r} is read as {type(tokenizer).__name__}, which cuts {text!r} into "
                f"{read[:6]}, while {file.name} says {own[:6]}; write its class into tokenizer_config.json, such as "
                '{"tokenizer_class": "LlamaTokenizer"}, or add the tokenizer.json of the model'
            )


def sentencepiece_file(name: str, revision: str | None = None) -> Path | None:
    """Return the sentencepiece model that a tokenizer is read from; None where there is none, or a tokenizer.json too.

    `name`: a folder, or a hub id that was loaded before and so is cached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        own, *others = (file if file.is_file() else None for file in map(folder.joinpath, (OWN, *FILES)))
    else:
        from huggingface_hub import try_to_load_from_cache

        cached = [try_to_load_from_cache(name, file, revision=revision) for file in (OWN, *FILES)]
        own, *others = (Path(file) if isinstance(file, str) else None for file in cached)
    return next(filter(None, others), None) if own is None else None
