"""The keys of a tool's section in toolformer.toml, and the weights of the hub that some of them name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo

from toolformer_dag.model.weights import ModelError, model_identity
from toolformer_dag.settings.explained import meant
from toolformer_dag.settings.sections import ToolSection
from toolformer_dag.settings.values import under


def _under_root(path: Path, info: ValidationInfo) -> Path:
    root: Path = (info.context or {}).get("root", Path())
    return under(root, path)


OptionPath = Annotated[Path, AfterValidator(_under_root)]
"""A path option: relative ones are read against the folder of toolformer.toml, `~` is the home folder."""


class ToolOptions(BaseModel):
    """What every tool understands; a tool with more options subclasses this. Unknown keys are refused.

    `prompt`: a file instead of the tool's own prompt.txt, or `embedded` for the short prompt of the made world.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str | None = None


def explain_options(key: str, error: ValidationError, options: type[ToolOptions]) -> str:
    """One line per mistake: section, key, what is wrong, and the remedy."""
    return "\n".join(
        f"[tools.{key}] {'.'.join(map(str, item['loc']))}: {_remedy(item['type'], item['msg'], item['loc'], options)}"
        for item in error.errors()
    )


def _remedy(kind: str, message: str, place: tuple[int | str, ...], options: type[ToolOptions]) -> str:
    if kind == "missing":
        return "this tool needs the key; add it to the section"
    if kind != "extra_forbidden":
        return f"{message.removeprefix('Value error, ')}; correct the value"
    known = {"use", *options.model_fields, *ToolSection.model_fields}
    return f"unknown key; {meant(str(place[-1]), known, 'keys')}"


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def _folder_under_root(name: str, info: ValidationInfo) -> str:
    root: Path = (info.context or {}).get("root", Path())
    folder = under(root, name)
    return str(folder.absolute()) if folder.is_dir() else name


PretrainedName = Annotated[str, AfterValidator(_folder_under_root)]
"""A folder (relative to toolformer.toml) or an id of the hub."""


class PretrainedOptions(ToolOptions):
    """model: a folder (relative to toolformer.toml) or an id of the hub; revision: the hub's; device: `auto` is the GPU
    where there is one; dtype: `auto` is bfloat16 on a GPU and float32 elsewhere.
    """

    model: PretrainedName = ""
    revision: str | None = None
    dtype: Dtype = "auto"
    device: str = "auto"

    def weights_identity(self) -> Mapping[str, object]:
        """The content of the weights. Raises ModelError for a folder that is no model."""
        return {"model": dict(model_identity(self.model, self.revision)), "dtype": self.dtype}


def load_tokenizer(class_name: str, options: PretrainedOptions) -> Any:
    """A tokenizer by the name of its class in transformers. Raises ModelError."""
    return _load(class_name, options, {})


def load_model(class_name: str, options: PretrainedOptions) -> Any:
    """A model in evaluation mode on its device, safetensors only, by the name of its class. Raises ModelError."""
    import torch

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    automatic = "bfloat16" if device.startswith("cuda") else "float32"
    dtype = getattr(torch, automatic if options.dtype == "auto" else options.dtype)
    return _load(class_name, options, {"dtype": dtype, "use_safetensors": True}).to(device).eval()


def _load(class_name: str, options: PretrainedOptions, keywords: Mapping[str, object]) -> Any:
    import transformers

    try:
        return getattr(transformers, class_name).from_pretrained(options.model, revision=options.revision, **keywords)
    except Exception as error:  # transformers raises what its backends raise
        reason = str(error).strip().partition("\n")[0][:300]
        raise ModelError(
            f"{class_name} cannot load {options.model!r}: {reason}. Set `model` to a folder of save_pretrained, "
            "or to an id of the hub that this machine can reach or has in its cache"
        ) from error
