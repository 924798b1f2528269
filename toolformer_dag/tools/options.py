"""The keys of a tool's section in toolformer.toml: reading them, showing them without secrets, loading their models."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from toolformer_dag.identity import fingerprint
from toolformer_dag.model.weights import read_model_identity
from toolformer_dag.settings.setting_types import mistake, under
from toolformer_dag.settings.tool_settings import ToolSettings


def root_of(info: ValidationInfo) -> Path:
    """Return the folder of toolformer.toml, from pydantic's validation context; without one the working directory."""
    context = info.context or {}
    root: Path = context.get("root", Path())
    return root


def _resolve_under_root(path: Path, info: ValidationInfo) -> Path:
    return under(root_of(info), path)


OptionPath = Annotated[Path, AfterValidator(_resolve_under_root)]
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
    """Explain to the user what is wrong in the section `[tools.KEY]`.

    Args:
        key: The key of the section.
        error: pydantic's error about it.
        options: The class of the tool's options.

    Returns:
        A line per mistake, such as `[tools.calculator] stict_rule: unknown key; did you mean 'strict_rule'?`
    """
    option_names = {"use", *options.model_fields, *ToolSettings.model_fields}

    lines = []
    for item in error.errors():
        option = ".".join(str(step) for step in item["loc"])
        explanation = mistake(item, option_names)
        lines.append(f"[tools.{key}] {option}: {explanation}")

    return "\n".join(lines)


def _require_linear_pattern(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Check that a pattern is accepted by polars' regular expressions, which are those of Rust.

    Raises:
        ValueError: It is not accepted.
    """
    # Rust matches in linear time, whereas Python may take for ever.
    import polars as pl

    try:
        occurs(pattern, "")
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


def occurs(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether a `LinearPattern` matches anywhere in the text, in time linear in its length."""
    import polars as pl

    return bool(pl.Series([text]).str.contains(pattern.pattern)[0])


MAX_SECONDS = 86_400.0
"""The longest time limit of an option: a day."""
PLAIN_SEGMENT = re.compile(r"[A-Za-z_.-]{1,24}|v[0-9]{1,3}[a-z]*[0-9]*")
"""A segment of a URL's path that cannot be a secret: a short word (`chat`), or a version (`v1`, `v1beta2`)."""
SECRET_NAME = re.compile(r"(?i)(?:^|[-_.])(?:key|token|secret|password|passwd|pwd|auth|authorization|credentials?)$")
"""A name that ends in a word for a secret, such as `api_key` or `X-Auth-Token`."""


def _require_web_address(url: str) -> str:
    """Check that a URL is http or https, and has a host and a possible port.

    Raises:
        ValueError: It is not.
    """
    parts = urlsplit(url)  # raises ValueError for a malformed host
    is_web = parts.scheme in ("http", "https") and bool(parts.hostname)
    has_only_visible_characters = url.isprintable() and " " not in url
    if not (is_web and has_only_visible_characters):
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
    _, _, host = parts.netloc.rpartition("@")
    path = "" if _list_secret_segments(parts.path) else parts.path

    shown = f"{parts.scheme}://{host}{path}"
    if shown == url:
        return url
    return f"{shown} (the rest is {fingerprint(url)})"


def _list_secret_segments(path: str) -> list[str]:
    """Return the segments of a URL's path that may be keys, as in `/hooks/T02AX7/notify`."""
    segments = [segment for segment in path.split("/") if segment]
    return [segment for segment in segments if not PLAIN_SEGMENT.fullmatch(segment)]


def mask_secret_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each value whose name is like `api_key` (SECRET_NAME) by a hash, at any depth, for records."""
    shown: dict[str, Any] = {}

    for name, value in values.items():
        if SECRET_NAME.search(name):
            shown[name] = f"(hidden, {fingerprint(value)})"
        elif isinstance(value, Mapping):
            shown[name] = mask_secret_values(value)
        else:
            shown[name] = value

    return shown


def list_url_secrets(url: str) -> list[str]:
    """List the parts of a URL that no message may repeat: user, password, query, and keys in the path.

    Some of them may be empty. `without_secrets` ignores these.
    """
    parts = urlsplit(url)
    credentials, _, _ = parts.netloc.rpartition("@")  # `user:password`
    secrets = [credentials, *credentials.split(":"), parts.query]

    for parameter in parts.query.split("&"):
        _, _, value = parameter.partition("=")
        secrets.append(value)

    return [*secrets, *_list_secret_segments(parts.path)]


def without_secrets(secrets: Iterable[str], text: str) -> str:
    """Return a message with every secret of four characters or more replaced by `***`."""
    long_secrets = {secret for secret in secrets if len(secret) >= 4}
    for secret in sorted(long_secrets, key=len, reverse=True):  # the longest first: it may contain others
        text = text.replace(secret, "***")
    return text


def _resolve_folder_under_root(name: str, info: ValidationInfo) -> str:
    """Return the absolute path of a folder relative to toolformer.toml; a name without a folder is a hub id."""
    folder = under(root_of(info), name)
    return str(folder.absolute()) if folder.is_dir() else name


PretrainedName = Annotated[str, AfterValidator(_resolve_folder_under_root)]
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

    def build_weights_identity(self) -> Mapping[str, object]:
        """Return the identity of the weights. Raises ModelError for a folder that is not a model folder."""
        return {"model": dict(read_model_identity(self.model, self.revision)), "dtype": self.dtype}


def load_tokenizer(class_name: str, options: PretrainedOptions) -> Any:
    """Load the options' tokenizer with a class of transformers, such as "AutoTokenizer". Raises ModelError."""
    from toolformer_dag.model.sentencepieces import check_sentencepiece

    tokenizer = _load_pretrained(class_name, options, {})
    check_sentencepiece(options.model, tokenizer, options.revision)
    return tokenizer


def load_model(class_name: str, options: PretrainedOptions) -> Any:
    """Load a pretrained model onto the device that the options name, in evaluation mode and only from safetensors.

    Args:
        class_name: A class of transformers, such as "AutoModelForSeq2SeqLM".
        options: The options of the tool.

    Raises:
        ModelError: The model cannot be loaded.
    """
    import torch

    device = _choose_device(options)
    dtype = getattr(torch, _choose_dtype_name(options, device))

    model = _load_pretrained(class_name, options, {"dtype": dtype, "use_safetensors": True})
    return model.to(device).eval()


def _choose_device(options: PretrainedOptions) -> str:
    """Return the device of the options; for "auto" the GPU if there is one."""
    import torch

    if options.device != "auto":
        return options.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _choose_dtype_name(options: PretrainedOptions, device: str) -> str:
    """Return the dtype of the options; for "auto" bfloat16 on a GPU, else float32."""
    if options.dtype != "auto":
        return options.dtype
    return "bfloat16" if device.startswith("cuda") else "float32"


def _load_pretrained(class_name: str, options: PretrainedOptions, keywords: Mapping[str, object]) -> Any:
    """Load a model or tokenizer with `from_pretrained` of a class of transformers. keywords: arguments for it."""
    import transformers

    from toolformer_dag.model.loading import load_from_hub

    model_class = getattr(transformers, class_name)
    return load_from_hub(model_class, options.model, {"revision": options.revision, **keywords})
