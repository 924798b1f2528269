"""Declare the table of recorded conversations whose calls are judged."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from toolformer_dag.settings.setting_types import SettingsTable, Unfingerprinted, to_absolute_pattern


class TraceSettings(SettingsTable):
    """Say which recorded conversations are judged, what a judge reads of them, and what counts as help."""

    source: Unfingerprinted[tuple[str, ...]] = Field(
        (),
        description="Files, folders or data sets of the hub with conversations, which `judge` reads where it is given "
        "none; where there are some, `traces/judged` is an asset.",
    )
    rendering: Literal["auto", "template", "hermes", "plain"] = Field(
        "auto",
        description="How a conversation is written for the judge: by the model's own chat template, as ChatML with "
        "Hermes' marks, or as plain lines; `auto` takes the first of these that fits the model.",
    )
    window: Literal["next_words", "next", "answer", "paper"] = Field(
        "next_words",
        description="Which words tell whether a result helped. `next_words`: the next 100 tokens that the assistant "
        "wrote, of at most four messages, with the arguments of their calls; they weigh alike. `next`: those of its "
        "next message; `answer`: of its last; `paper`: the first tokens, with falling weights.",
    )
    swaps: int = Field(
        2,
        ge=2,
        le=100,
        description="Results that a call is held against, one at a time: of the same tool in other conversations, else "
        "its own with other values, else of other tools.",
    )
    result_tokens: int = Field(200, ge=8, description="Tokens of a result that the judge reads; the rest is cut.")
    context_tokens: int = Field(
        1024, ge=0, description="Tokens before the message with the call that the judge reads, the last ones."
    )
    share: Unfingerprinted[float] = Field(
        0.05,
        gt=0,
        lt=1,
        description="Share of swapped results that may pass for help: it sets the threshold of the gain.",
    )

    def with_absolute_paths(self, root: Path) -> Self:
        """Return a copy with absolute paths of the files and folders in `source`.

        Names for which there is no file or folder stay unchanged, because they are data sets of the hub.

        Args:
            root: The folder from which relative paths count.
        """
        sources = []
        for name in self.source:
            path = to_absolute_pattern(name, root)
            is_local = Path(path).exists()
            sources.append(path if is_local else name)
        return self.model_copy(update={"source": tuple(sources)})
