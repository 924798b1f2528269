"""What a tool is: its name in the text, the texts it looks at, and how it answers a batch of calls."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from toolformer_dag.errors import UserError
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.options import ToolOptions

LOST: Final = "lost:"


class ToolDown(UserError):
    """The tool as a whole cannot work: its lane stops. The message names the tool, the reason and the remedy."""


class RetryableError(RuntimeError):
    """Raised by `Tool.run` when the same batch may succeed a little later: a lost connection, a busy server."""


@dataclass(frozen=True, slots=True)
class ToolDefaults:
    """The paper's thresholds of a tool (table in section 4.1): tau_s, k and m for sampling, tau_f for filtering."""

    tau_s: float
    k: int
    m: int
    tau_f: float


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a tool is asked. `context`: the ISO date of the document for the calendar, else empty."""

    input: str
    context: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """One text, or a short named reason why there is none; never both. `cost`: as the backend tells it."""

    result: str | None
    reason: str | None = None
    seconds: float = 0.0
    cost: float | None = None

    def __post_init__(self) -> None:
        if (self.result is None) == (self.reason is None):
            raise ValueError(f"a tool result is a text or a reason: {self.result!r}, {self.reason!r}")

    @property
    def lost(self) -> bool:
        """No answer of the tool but an accident (time limit, connection, exception): worth another try later."""
        return self.reason is not None and self.reason.startswith(LOST)


class Tool(ABC):
    """A tool of one lane. A subclass sets `name`, `version` and `defaults` and writes `run`; the rest has defaults.

    Construction is cheap and imports no torch: weights and indexes are loaded in the first `run`. `run` is called from
    several threads at once where the lane's `concurrency` is above 1, and again after a call that timed out.
    """

    key: str
    """The section of toolformer.toml and the lane: `calculator`."""
    name: str
    """As it stands in the text: `Calculator`."""
    version: str
    """Raised by hand whenever the same call would give another result; enters fingerprints."""
    defaults: ToolDefaults
    prompt: str
    """Instruction and examples of P(x) (appendix A.2), without the last `Input: x / Output:`."""
    Options: ClassVar[type[ToolOptions]] = ToolOptions
    """The keys that the tool's section may hold beside thresholds and limits."""
    batch_size: int = 32
    """How many calls `run` gets at most; 1 for a backend that answers one at a time."""

    def __init__(self, key: str, options: ToolOptions, prompt: str) -> None:
        self.key = key
        self.options = options
        self.prompt = prompt

    def wants_document(self, document: Document) -> str | None:
        """A cheap look at the whole document: None refuses it, else why it is wanted."""
        return "every_text"

    def wants(self, text: str, document: Document) -> str | None:
        """The same for one segment of a wanted document."""
        return "every_text"

    def context(self, document: Document) -> str:
        """What the result depends on beside the input; empty for every tool but the calendar."""
        return ""

    def keeps(self, text: str, offset: int, input: str) -> bool:
        """Whether a call that passed the filter may stay; `offset` is the character of `text` at which x_i begins."""
        return True

    def prepare(self, progress: Callable[[int], None]) -> None:
        """What the first `run` would do beforehand, outside a call's time limit; `progress` is told what is done."""
        progress(0)

    def connect(self) -> None:  # noqa: B027 - most tools reach for nothing
        """Reach what answers, where that is not done yet; called before every batch, outside its time limit.

        Raises RetryableError when it may succeed later, ToolDown when the tool as a whole cannot work.
        """

    def timed_out(self) -> None:  # noqa: B027 - most tools hold nothing that hangs
        """Called after a batch exceeded its time limit, before the next: let go of what may still hang. Raises nothing.

        Where `concurrency` is above 1, other calls are under way; those that this ends raise RetryableError.
        """

    @abstractmethod
    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """One result per call, in order. A bad input gives a reason and never raises.

        Raises RetryableError when the batch may succeed later, ToolDown when the tool as a whole cannot work.
        """

    def identity(self) -> Mapping[str, object]:
        """What determines the results beside `version`; enters fingerprints. Here: every option but the prompt."""
        return self.options.model_dump(mode="json", exclude={"prompt"})

    def selection(self) -> Mapping[str, object]:
        """What determines which texts are wanted, and their contexts, beside `version`. Here: `identity`.

        To be overridden where `wants` looks at an option that the results do not depend on.
        """
        return self.identity()


QUOTES = (('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"), ("«", "»"))


def unquote(text: str) -> str:
    """The text without surrounding white space and without one pair of quotes around all of it.

    Of `"Hamlet" or "Macbeth"` nothing is taken; of `"He said "hi" to me"` the outer pair.
    """
    stripped = text.strip()
    for (opening, closing), apart in zip(QUOTES, _APART, strict=True):
        if len(stripped) >= 2 and stripped.startswith(opening) and stripped.endswith(closing):
            inside = stripped[1:-1]
            return stripped if apart.fullmatch(inside) else inside.strip()
    return stripped


def _apart(opening: str, closing: str) -> re.Pattern[str]:
    """The inside of two quotations, `Hamlet" or "Macbeth`: its first quote closes, its last opens."""
    unquoted = rf"(?:[^{opening}{closing}]|(?<=\w)[{opening}{closing}](?=\w))*+"
    return re.compile(rf"{unquoted}(?<=\S){closing}(?!\w)(?:.*(?<!\w))?{opening}(?=\S){unquoted}", re.DOTALL)


_APART = [_apart(*pair) for pair in QUOTES]
