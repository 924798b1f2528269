"""The keys of a tool's section in toolformer.toml: reading them, showing them without secrets, loading their models."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from toolformer_dag.identity import fingerprint
from toolformer_dag.model.weights import model_identity
from toolformer_dag.settings.setting_types import mistake, under
from toolformer_dag.settings.tool_settings import ToolSettings


def _under_root(path: Path, info: ValidationInfo) -> Path:
    root: Path = (info.context or {}).get("root", Path())
    return under(root, path)


OptionPath = Annotated[Path, AfterValidator(_under_root)]
"""A path option: relative to the folder of toolformer.toml; `~` is the home folder."""


class ToolOptions(BaseModel):
    """The options of every tool; a tool with more options subclasses this. Unknown keys are rejected.

    - prompt: a file that replaces the tool's own prompt, or `embedded` for the synthetic world's short prompt.
    - examples: two to five sentences with calls, from which a prompt is written, in place of a file.
    - description: what the tool does, in a sentence, for that prompt and for models that get a list of their tools.

    A secret is best read from an environment variable; as a key of its own it is a `pydantic.SecretStr`, which no
    record shows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prompt: str | None = None
    examples: tuple[str, ...] | None = Field(None, min_length=2, max_length=5)
    description: str = ""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.prompt is not None and self.examples is not None:
            raise ValueError("prompt and examples both say what the prompt is; remove one of them")
        return self


def explain_options(key: str, error: ValidationError, options: type[ToolOptions]) -> str:
    """Format a validation error: a line per mistake with section, key, problem and remedy."""
    known = {"use", *options.model_fields, *ToolSettings.model_fields}
    return "\n".join(
        f"[tools.{key}] {'.'.join(map(str, item['loc']))}: {mistake(item, known)}" for item in error.errors()
    )


def _linear(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Refuse what Rust's regular expressions lack: they match in linear time, where Python's may take for ever."""
    import polars as pl

    try:
        occurs(pattern, "")
    except pl.exceptions.PolarsError as error:
        reason = " ".join(str(error).partition("This error occurred")[0].split())
        raise ValueError(
            f"{reason}; write it in the syntax of Rust's regular expressions, which have no look-around, no "
            "backreferences, and `\\z` for the end of a text"
        ) from error
    return pattern


LinearPattern = Annotated[re.Pattern[str], AfterValidator(_linear)]
"""A regular expression that is matched by Rust's engine: in linear time, without look-around and backreferences."""


def occurs(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether the pattern matches anywhere in the text."""
    import polars as pl

    return bool(pl.Series([text]).str.contains(pattern.pattern)[0])


MAX_SECONDS = 86_400.0
"""The longest time limit of an option: a day."""
PLAIN_SEGMENT = re.compile(r"[A-Za-z_.-]{1,24}|v[0-9]{1,3}[a-z]*[0-9]*")
"""A part of a path that is a word or a version, and so no key."""
SECRET_NAME = re.compile(r"(?i)(?:^|[-_.])(?:key|token|secret|password|passwd|pwd|auth|authorization|credentials?)$")


def _address(url: str) -> str:
    parts = urlsplit(url)  # a ValueError of its own for a bad host
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        raise ValueError("the address is none of http:// or https://, such as http://localhost:8000/v1")
    if parts.port == 0:  # a ValueError of its own above 65535
        raise ValueError("the address has the port 0, which nothing listens on")
    return url


WebAddress = Annotated[str, AfterValidator(_address)]


def shown_url(url: str) -> str:
    """Return a URL for records and messages: without user, password and query, and without path parts like keys.

    What is left out is replaced by its hash, so that records of two URLs differ.
    """
    parts = urlsplit(url)
    segments = [segment for segment in parts.path.split("/") if segment]
    plain = all(PLAIN_SEGMENT.fullmatch(segment) for segment in segments)
    host, path = parts.netloc.rpartition("@")[2], parts.path if plain else ""
    shown = f"{parts.scheme}://{host}{path}"
    return shown if shown == url else f"{shown} (the rest is {fingerprint(url)})"


def shown_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table for records: values whose name is that of a secret are replaced by their hash."""
    return {
        name: f"(hidden, {fingerprint(value)})"
        if SECRET_NAME.search(name)
        else shown_values(value)
        if isinstance(value, Mapping)
        else value
        for name, value in values.items()
    }


def url_secrets(url: str) -> list[str]:
    """Return what of a URL no message may repeat."""
    parts = urlsplit(url)
    user, _, _ = parts.netloc.rpartition("@")
    values = [piece.partition("=")[2] for piece in parts.query.split("&")]
    keys = [segment for segment in parts.path.split("/") if segment and not PLAIN_SEGMENT.fullmatch(segment)]
    return [user, *user.split(":"), parts.query, *values, *keys]


def without(secrets: Iterable[str], text: str) -> str:
    """Return a message with every secret of four characters or more replaced by `***`."""
    for secret in sorted({secret for secret in secrets if len(secret) >= 4}, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _folder_under_root(name: str, info: ValidationInfo) -> str:
    root: Path = (info.context or {}).get("root", Path())
    folder = under(root, name)
    return str(folder.absolute()) if folder.is_dir() else name


PretrainedName = Annotated[str, AfterValidator(_folder_under_root)]
"""A folder (relative to toolformer.toml) or a hub id."""


class PretrainedOptions(ToolOptions):
    """Options of a tool with a pretrained model.

    - model: a folder (relative to toolformer.toml) or a hub id; revision: the hub revision.
    - device: `auto` is the GPU if present.
    - dtype: `auto` is bfloat16 on a GPU and float32 elsewhere.
    """

    model: PretrainedName = ""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"

    def weights_identity(self) -> Mapping[str, object]:
        """Return the identity of the weights. Raises ModelError for a folder that is not a model folder."""
        return {"model": dict(model_identity(self.model, self.revision)), "dtype": self.dtype}


def load_tokenizer(class_name: str, options: PretrainedOptions) -> Any:
    """Load a tokenizer with a class of transformers. Raises ModelError."""
    from toolformer_dag.model.sentencepieces import check_sentencepiece

    tokenizer = _load(class_name, options, {})
    check_sentencepiece(options.model, tokenizer, options.revision)
    return tokenizer


def load_model(class_name: str, options: PretrainedOptions) -> Any:
    """Load a model with a class of transformers, in evaluation mode; safetensors only. Raises ModelError."""
    import torch

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    automatic = "bfloat16" if device.startswith("cuda") else "float32"
    dtype = getattr(torch, automatic if options.dtype == "auto" else options.dtype)
    return _load(class_name, options, {"dtype": dtype, "use_safetensors": True}).to(device).eval()


def _load(class_name: str, options: PretrainedOptions, keywords: Mapping[str, object]) -> Any:
    import transformers

    from toolformer_dag.model.loading import from_hub

    return from_hub(getattr(transformers, class_name), options.model, {"revision": options.revision, **keywords})
