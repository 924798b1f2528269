"""Check that transformers reads a sentencepiece model as sentencepiece does; it gives no warning itself."""

from pathlib import Path
from typing import Any

from toolformer_dag.model.weights import ModelError

SENTENCEPIECE_FILE_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Names of sentencepiece models: of Llama, T5 and NLLB. Llama 3's tokenizer.model is none, but tiktoken's."""
FAST_TOKENIZER_FILE_NAME = "tokenizer.json"
"""The file of a fast tokenizer. With it nothing is converted, and nothing has to be checked."""
TRIAL_TEXTS = ("the total is 94 + 23 = 117 apples .", "he came ( in 2019 ) -> [ and left", "добрый день , 東京 !")
"""In lower case and without accents: some tokenizers change these before sentencepiece sees the text."""


def check_sentencepiece_tokenizer(name: str, tokenizer: Any, revision: str | None = None) -> None:
    """Check that a tokenizer cuts texts into the same tokens as the sentencepiece model that it was read from.

    transformers may convert such a model into a tokenizer of the wrong class, without a warning. The check does not
    cover accents, upper case and white space, where some tokenizers differ by design. A model without a sentencepiece
    file is not checked.

    Args:
        name: The folder or hub id of the model.
        tokenizer: Its tokenizer, as transformers loaded it.
        revision: The revision on the hub.

    Raises:
        ModelError: The tokenizer cuts a trial text into other tokens.
    """
    model_file = find_sentencepiece_file(name, revision)
    if model_file is None:
        return

    sentencepiece_model = _load_sentencepiece_model(model_file)
    if sentencepiece_model is None:
        return

    for text in TRIAL_TEXTS:
        # The tokens are compared by their texts, because NLLB gives them other ids.
        tokens = tokenizer.tokenize(text)
        expected_tokens = _split_into_pieces(sentencepiece_model, text, unknown_token=tokenizer.unk_token)
        if tokens != expected_tokens:
            raise ModelError(
                f"the tokenizer of {name!r} is read as {type(tokenizer).__name__}, which cuts {text!r} into "
                f"{tokens[:6]}, while {model_file.name} says {expected_tokens[:6]}; write its class into "
                'tokenizer_config.json, such as {"tokenizer_class": "LlamaTokenizer"}, '
                "or add the tokenizer.json of the model"
            )


def _load_sentencepiece_model(model_file: Path) -> Any | None:
    """Read a sentencepiece model, or return None for a file of another kind, such as tiktoken's of the same name."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(model_file))
    except RuntimeError:
        return None


def _split_into_pieces(sentencepiece_model: Any, text: str, unknown_token: str) -> list[str]:
    """Cut a text into tokens by a sentencepiece model, and return their texts.

    Args:
        sentencepiece_model: The model.
        text: The text.
        unknown_token: Stands for each token that the model does not know.
    """
    pieces = []
    for token_id in sentencepiece_model.encode(text):
        is_unknown = sentencepiece_model.is_unknown(token_id)
        pieces.append(unknown_token if is_unknown else sentencepiece_model.id_to_piece(token_id))
    return pieces


def find_sentencepiece_file(name: str, revision: str | None = None) -> Path | None:
    """Find the sentencepiece file from which transformers reads a model's tokenizer.

    Args:
        name: The folder of the model, or its hub id.
        revision: The revision on the hub.

    Returns:
        The file, in the folder or in the hub's cache. None if there is no such file, or if there is a tokenizer.json,
        which is read instead.
    """
    if _find_model_file(name, FAST_TOKENIZER_FILE_NAME, revision) is not None:
        return None

    for file_name in SENTENCEPIECE_FILE_NAMES:
        file = _find_model_file(name, file_name, revision)
        if file is not None:
            return file
    return None


def _find_model_file(name: str, file_name: str, revision: str | None) -> Path | None:
    """Find a file of a model in its folder or, for a hub id, in the hub's cache.

    Returns:
        The file, or None if it is not there.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        file = folder / file_name
        return file if file.is_file() else None

    from huggingface_hub import try_to_load_from_cache

    cached_file = try_to_load_from_cache(name, file_name, revision=revision)
    return Path(cached_file) if isinstance(cached_file, str) else None
