"""`toolformer-dag generate`: a model writes on, calling tools as it goes."""

from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.options import Config, ModelName, Profile, Set, settings_of
from toolformer_dag.errors import UserError

if TYPE_CHECKING:
    from toolformer_dag.decoding.generation import Generation

REMEDIES = {
    "does_not_fit": "the text fills the model's context; give a shorter one",
    "empty_prompt": "this model begins with nothing of its own; give a text",
}


def generate(
    text: Annotated[str, typer.Argument(help="The text to go on from.")],
    model: ModelName = None,
    k: Annotated[
        int | None, typer.Option(min=0, help="A call starts when ` [` is among the k most likely tokens.")
    ] = None,
    disabled: Annotated[
        bool, typer.Option("--disabled", help="No calls: the probability of ` [` is set to 0.")
    ] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to write at most.")] = None,
    context: Annotated[str, typer.Option(help="Today's date for the calendar, as 2023-01-30.")] = "",
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Print the text with the calls that were made while decoding.

    The model is the checkpoint finetuned from model.name where there is one, else model.name itself.

    Example: toolformer-dag generate "Ada had 17 apples and got 25 more, so in total there were"
    """
    from toolformer_dag.checkpoints import finetuned_or_base, load_model
    from toolformer_dag.decoding.greedy import generate as decode
    from toolformer_dag.lane import lanes

    _refuse_broken(text)
    settings = settings_of(config, profile, set)
    known = lanes(settings)
    [generation] = decode(
        load_model(settings.model, model or finetuned_or_base(settings)),
        [text],
        {lane.tool.name: lane.tool for lane in known},
        k=settings.decoding.k if k is None else k,
        disabled=disabled,
        max_new_tokens=settings.decoding.max_new_tokens if max_new_tokens is None else max_new_tokens,
        contexts=[context],
        limits={lane.tool.name: lane.limits for lane in known},
        max_call_tokens=settings.sampling.max_call_tokens,
    )
    _tell(generation)
    typer.echo(text + generation.text)


def _tell(generation: "Generation") -> None:
    """Why calls have no result; raises UserError where nothing was written."""
    if generation.reason is not None:
        raise UserError(f"nothing was written, {generation.reason}: {REMEDIES[generation.reason]}")
    for call in generation.calls:
        if call.reason is not None:
            written = f"{call.tool}({call.input})" if call.tool else call.input
            typer.echo(f"[{written}] has no result: {call.reason}", err=True)


def _refuse_broken(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is no valid UTF-8 ({error.reason}); give it in UTF-8") from error
