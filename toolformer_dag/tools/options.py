"""The keys of a tool's section in toolformer.toml: reading them, showing them without secrets, loading their models."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from toolformer_dag.identity import fingerprint
from toolformer_dag.model.weights import read_model_identity
from toolformer_dag.settings.setting_types import explain_validation_error, resolve_path
from toolformer_dag.settings.tool_settings import ToolSettings


def get_settings_folder(info: ValidationInfo) -> Path:
    """Return the folder of toolformer.toml, which pydantic knows from the context of the validation.

    Without a context this is the working directory.
    """
    context = info.context or {}
    root: Path = context.get("root", Path())
    return root


def _resolve_under_root(path: Path, info: ValidationInfo) -> Path:
    """Resolve a path relative to the folder of toolformer.toml."""
    return resolve_path(get_settings_folder(info), path)


OptionPath = Annotated[Path, AfterValidator(_resolve_under_root)]
"""A path option: relative to the folder of toolformer.toml; `~` is the home folder."""


class ToolOptions(BaseModel):
    """The options of every tool; a tool with more options subclasses this. Unknown keys are rejected.

    A secret is best read from an environment variable. As a key of its own it is a `pydantic.SecretStr`, which no
    record shows.

    Attributes:
        prompt: A file that replaces the tool's own prompt, or `embedded` for the synthetic world's short prompt.
        examples: Two to five sentences with calls, from which a prompt is written, in place of a file.
        description: What the tool does, in a sentence, for that prompt and for models that get a list of their tools.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prompt: str | None = None
    examples: tuple[str, ...] | None = Field(None, min_length=2, max_length=5)
    description: str = ""

    @model_validator(mode="after")
    def _require_single_prompt(self) -> Self:
        """Check that not both `prompt` and `examples` are set.

        Raises:
            ValueError: Both are.
        """
        if self.prompt is not None and self.examples is not None:
            raise ValueError("prompt and examples both say what the prompt is; remove one of them")
        return self


def explain_option_errors(tool_key: str, validation_error: ValidationError, options_class: type[ToolOptions]) -> str:
    """Explain to the user what is wrong in the section `[tools.KEY]`.

    Args:
        tool_key: The key of the section.
        validation_error: pydantic's error about it.
        options_class: The class of the tool's options.

    Returns:
        A line per mistake, such as `[tools.calculator] stict_rule: unknown key; did you mean 'strict_rule'?`
    """
    option_names = {"use", *options_class.model_fields, *ToolSettings.model_fields}

    lines = []
    for mistake in validation_error.errors():
        option_path = ".".join(str(step) for step in mistake["loc"])  # such as "stict_rule", or "inference.reader"
        explanation = explain_validation_error(mistake, option_names)
        lines.append(f"[tools.{tool_key}] {option_path}: {explanation}")

    return "\n".join(lines)


def _require_linear_pattern(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Check that a pattern is accepted by polars, whose regular expressions are those of Rust.

    Rust matches in a time linear in the length of the text, whereas Python may take for ever.

    Raises:
        ValueError: It is not accepted.
    """
    import polars as pl

    try:
        has_match(pattern, "")
    except pl.exceptions.PolarsError as error:
        message, _, _ = str(error).partition("This error occurred")
        reason = " ".join(message.split())
        raise ValueError(
            f"{reason}; write it in the syntax of Rust's regular expressions, which have no look-around, no "
            "backreferences, and `\\z` for the end of a text"
        ) from error

    return pattern


LinearPattern = Annotated[re.Pattern[str], AfterValidator(_require_linear_pattern)]
"""A regular expression that is matched by Rust's engine: in linear time, without look-around and backreferences."""


def has_match(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether a `LinearPattern` matches anywhere in a text, in a time linear in the length of the text."""
    import polars as pl

    matches = pl.Series([text]).str.contains(pattern.pattern)
    return bool(matches[0])


MAX_TIMEOUT_SECONDS = 86_400.0
"""The longest time limit of an option: a day."""
PLAIN_SEGMENT_PATTERN = re.compile(r"[A-Za-z_.-]{1,24}|v[0-9]{1,3}[a-z]*[0-9]*")
"""A segment of a URL's path that cannot be a secret: a short word (`chat`), or a version (`v1`, `v1beta2`)."""
SECRET_NAME_PATTERN = re.compile(
    r"(?i)(?:^|[-_.])(?:key|token|secret|password|passwd|pwd|auth|authorization|credentials?)$"
)
"""A name that ends in a word for a secret, such as `api_key` or `X-Auth-Token`."""


def _require_web_address(url: str) -> str:
    """Check that a URL is http or https, and has a host and a possible port.

    Raises:
        ValueError: It is another URL or none.
    """
    parts = urlsplit(url)  # raises ValueError for a malformed host
    has_web_scheme = parts.scheme in ("http", "https")
    has_host = bool(parts.hostname)
    has_only_visible_characters = url.isprintable() and " " not in url
    if not (has_web_scheme and has_host and has_only_visible_characters):
        raise ValueError("the address is none of http:// or https://, such as http://localhost:8000/v1")

    if parts.port == 0:  # reading the port raises ValueError above 65535
        raise ValueError("the address has the port 0, which nothing listens on")

    return url


WebAddress = Annotated[str, AfterValidator(_require_web_address)]
"""An http or https URL."""


def mask_url(url: str) -> str:
    """Hide the parts of a URL that may be secret, for records and messages.

    User, password, query, fragment, and a path that may contain a key, are replaced by a hash of the URL.

    Returns:
        For example `https://host (the rest is 5f3a...)`, or the URL itself if nothing is hidden.
    """
    parts = urlsplit(url)
    _, _, host = parts.netloc.rpartition("@")  # without `user:password@`
    may_have_secret_path = len(_list_secret_segments(parts.path)) > 0
    path = "" if may_have_secret_path else parts.path

    shown_url = f"{parts.scheme}://{host}{path}"
    if shown_url == url:
        return url
    return f"{shown_url} (the rest is {fingerprint(url)})"


def _list_secret_segments(url_path: str) -> list[str]:
    """Return the segments of a URL's path that may be secret keys, such as `T02AX7` in `/hooks/T02AX7/notify`."""
    segments = [segment for segment in url_path.split("/") if segment]
    return [segment for segment in segments if not PLAIN_SEGMENT_PATTERN.fullmatch(segment)]


def mask_secret_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each value that may be a secret by a hash, also in nested mappings, so that records can show the rest.

    A value may be a secret if its name is like `api_key` (see SECRET_NAME_PATTERN).
    """
    shown_values: dict[str, Any] = {}

    for name, value in values.items():
        if SECRET_NAME_PATTERN.search(name):
            shown_values[name] = f"(hidden, {fingerprint(value)})"
        elif isinstance(value, Mapping):
            shown_values[name] = mask_secret_values(value)
        else:
            shown_values[name] = value

    return shown_values


def list_url_secrets(url: str) -> list[str]:
    """List the parts of a URL that no message may repeat: user, password, query, and keys in the path.

    Some of them may be empty. `mask_secrets` ignores these.
    """
    parts = urlsplit(url)
    credentials, _, _ = parts.netloc.rpartition("@")  # `user:password`
    secrets = [credentials, *credentials.split(":"), parts.query]

    for parameter in parts.query.split("&"):
        _, _, value = parameter.partition("=")
        secrets.append(value)

    return [*secrets, *_list_secret_segments(parts.path)]


def mask_secrets(secrets: Iterable[str], text: str) -> str:
    """Replace each secret in a text by `***`, so that the text can be shown.

    Secrets of less than four characters are left in, because they are likely to be parts of words.
    """
    long_secrets = {secret for secret in secrets if len(secret) >= 4}
    # The longest one comes first, because it may contain others.
    for secret in sorted(long_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _resolve_folder_under_root(model_name: str, info: ValidationInfo) -> str:
    """Return the absolute path of a model folder, which is relative to the folder of toolformer.toml.

    A name without such a folder is returned as it is: the id of a model on the Hugging Face hub.
    """
    folder = resolve_path(get_settings_folder(info), model_name)
    return str(folder.absolute()) if folder.is_dir() else model_name


PretrainedName = Annotated[str, AfterValidator(_resolve_folder_under_root)]
"""A folder (relative to toolformer.toml) or a hub id."""


class PretrainedOptions(ToolOptions):
    """Options of a tool with a pretrained model.

    Attributes:
        model: A folder (relative to toolformer.toml) or the id of a model on the Hugging Face hub.
        revision: The revision of the model on the hub.
        device: `auto` is the GPU if present.
        dtype: `auto` is bfloat16 on a GPU and float32 elsewhere.
    """

    model: PretrainedName = ""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"

    def build_weights_identity(self) -> Mapping[str, object]:
        """Return what identifies the weights, for fingerprints: the model's identity and the dtype.

        Raises:
            ModelError: `model` is a folder that is not a model folder.
        """
        return {"model": dict(read_model_identity(self.model, self.revision)), "dtype": self.dtype}


def load_tokenizer(class_name: str, options: PretrainedOptions) -> Any:
    """Load the tokenizer of a pretrained model, and check it.

    Args:
        class_name: A class of transformers, such as "AutoTokenizer".
        options: The options of the tool, which name the model.

    Raises:
        ModelError: The tokenizer cannot be loaded.
    """
    from toolformer_dag.model.sentencepieces import check_sentencepiece_tokenizer

    tokenizer = _load_pretrained(class_name, options, {})
    check_sentencepiece_tokenizer(options.model, tokenizer, options.revision)
    return tokenizer


def load_model(class_name: str, options: PretrainedOptions) -> Any:
    """Load a pretrained model onto the device that the options name, in evaluation mode and only from safetensors.

    Args:
        class_name: A class of transformers, such as "AutoModelForSeq2SeqLM".
        options: The options of the tool, which name the model.

    Raises:
        ModelError: The model cannot be loaded.
    """
    import torch

    device = _choose_device(options)
    dtype_name = _choose_dtype_name(options, device)
    dtype = getattr(torch, dtype_name)

    model = _load_pretrained(class_name, options, {"dtype": dtype, "use_safetensors": True})
    return model.to(device).eval()


def _choose_device(options: PretrainedOptions) -> str:
    """Return the device that the options name; "auto" is the GPU if there is one, or else the CPU."""
    import torch

    if options.device != "auto":
        return options.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _choose_dtype_name(options: PretrainedOptions, device: str) -> str:
    """Return the dtype that the options name; "auto" is bfloat16 on a GPU, or else float32."""
    if options.dtype != "auto":
        return options.dtype
    return "bfloat16" if device.startswith("cuda") else "float32"


def _load_pretrained(class_name: str, options: PretrainedOptions, load_arguments: Mapping[str, object]) -> Any:
    """Load a model or tokenizer with `from_pretrained` of a class of transformers.

    Args:
        class_name: The name of the class.
        options: The options of the tool, which name the model.
        load_arguments: Further arguments of `from_pretrained`.

    Raises:
        ModelError: The model or tokenizer cannot be loaded.
    """
    import transformers

    from toolformer_dag.model.loading import load_pretrained

    model_class = getattr(transformers, class_name)
    return load_pretrained(model_class, options.model, {"revision": options.revision, **load_arguments})
