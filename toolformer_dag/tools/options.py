"""The keys of a tool's section in toolformer.toml, and loading the models that they name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo

from toolformer_dag.model.weights import ModelError, model_identity
from toolformer_dag.settings.sections import ToolSettings, meant, under


def _under_root(path: Path, info: ValidationInfo) -> Path:
    root: Path = (info.context or {}).get("root", Path())
    return under(root, path)


OptionPath = Annotated[Path, AfterValidator(_under_root)]
"""A path option: relative to the folder of toolformer.toml; `~` is the home folder."""


class ToolOptions(BaseModel):
    """The options of every tool; a tool with more options subclasses this. Unknown keys are rejected.

    `prompt`: a file that replaces the tool's own prompt, or `embedded` for the synthetic world's short prompt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str | None = None


def explain_options(key: str, error: ValidationError, options: type[ToolOptions]) -> str:
    """Format a validation error: a line per mistake with section, key, problem and remedy."""
    return "\n".join(
        f"[tools.{key}] {'.'.join(map(str, item['loc']))}: {_remedy(item['type'], item['msg'], item['loc'], options)}"
        for item in error.errors()
    )


def _remedy(kind: str, message: str, place: tuple[int | str, ...], options: type[ToolOptions]) -> str:
    if kind == "missing":
        return "this tool needs the key; add it to the section"
    if kind != "extra_forbidden":
        return f"{message.removeprefix('Value error, ')}; correct the value"
    known = {"use", *options.model_fields, *ToolSettings.model_fields}
    return f"unknown key; {meant(str(place[-1]), known, 'keys')}"


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


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
    dtype: Dtype = "auto"
    device: str = "auto"

    def weights_identity(self) -> Mapping[str, object]:
        """Return the identity of the weights. Raises ModelError for a folder that is not a model folder."""
        return {"model": dict(model_identity(self.model, self.revision)), "dtype": self.dtype}


def load_tokenizer(class_name: str, options: PretrainedOptions) -> Any:
    """Load a tokenizer with a class of transformers. Raises ModelError."""
    return _load(class_name, options, {})


def load_model(class_name: str, options: PretrainedOptions) -> Any:
    """Load a model with a class of transformers, in evaluation mode; safetensors only. Raises ModelError."""
    import torch

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    automatic = "bfloat16" if device.startswith("cuda") else "float32"
    dtype = getattr(torch, automatic if options.dtype == "auto" else options.dtype)
    return _load(class_name, options, {"dtype": dtype, "use_safetensors": True}).to(device).eval()


def _load(class_name: str, options: PretrainedOptions, keywords: Mapping[str, object]) -> Any:
    import transformers

    try:
        return getattr(transformers, class_name).from_pretrained(options.model, revision=options.revision, **keywords)
    except Exception as error:  # backends of transformers raise many kinds
        reason = str(error).strip().partition("\n")[0][:300]
        raise ModelError(
            f"{class_name} cannot load {options.model!r}: {reason}. Set `model` to a folder of save_pretrained, "
            "or to a hub id that this machine can reach or has cached"
        ) from error
