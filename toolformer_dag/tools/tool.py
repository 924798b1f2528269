"""The interface of a tool: its name, the texts it selects, and how it answers a batch of calls."""

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ValidationError

from toolformer_dag.files import UserError
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.arguments import BadArguments, Schema, read_arguments
from toolformer_dag.texts.calls import one_line
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.options import ToolOptions

LOST: Final = "lost:"
LONGEST_ABOUT = 300
"""Characters of a description that a model gets."""
MOST_DESCRIBED = 10_000
"""Characters of a description that are read."""


class ToolDown(UserError):
    """The tool as a whole cannot work, and its lane stops. The message names the tool, the reason and the remedy."""


class RetryableError(RuntimeError):
    """Raised by `Tool.run` when the same batch may succeed later: a lost connection, a busy server."""


class OverBudget(Exception):
    """Raised by `Tool.wants_document` and `Tool.wants` for a text that costs more work than a rule may spend on it.

    The document, or the text, is left out and counted under the reason `over_budget`.
    """


class WorkBudget:
    """The steps that a rule may take for one text. Steps and not seconds: every machine leaves out the same texts."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Count steps before they are taken. Raises OverBudget where they are more than what is left."""
        self._left -= steps
        if self._left < 0:
            raise OverBudget


@dataclass(frozen=True, slots=True)
class ToolDefaults:
    """The paper's thresholds of a tool (table in section 4.1): tau_s, k and m for sampling, tau_f for filtering."""

    tau_s: float
    k: int
    m: int
    tau_f: float


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The input of a call; `context` is the document's ISO date for the calendar, else empty.

    `arguments`: those that `Tool.run` gets, read from `input`: an instance of `Tool.Arguments`; None without them.
    """

    input: str
    context: str = ""
    arguments: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A text, or a short reason for its absence; never both. `cost`: as the backend reports it."""

    result: str | None
    reason: str | None = None
    seconds: float = 0.0
    cost: float | None = None

    def __post_init__(self) -> None:
        if (self.result is None) == (self.reason is None):
            raise ValueError(f"a tool result is either a text or a reason: {self.result!r}, {self.reason!r}")

    @property
    def lost(self) -> bool:
        """Return whether the call failed by accident (time limit, connection, exception) and may succeed later."""
        return self.reason is not None and self.reason.startswith(LOST)


@dataclass(frozen=True, slots=True)
class Proposed:
    """A call that a rule proposes: `input`, before the character `offset` of the text.

    `words`: what the rule has seen the text say after the call. Only a result that holds them counts, and it must beat
    an echo: the result of the input `words`, which holds them too. Empty for a rule that does not look ahead.
    """

    offset: int
    input: str
    words: str = ""


NO_ANSWER = ToolResult(None, "no_answer")


class NoResult(Exception):
    """Raised within a tool where a call has no result; `reason` is short and stable, for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Tool(ABC):
    """The tool of a lane. A subclass sets `name`, `version` and `defaults` and defines `run`; the rest has defaults.

    Construction must be cheap and must not import torch: load weights and indexes in the first `run`. Several threads
    call `run` at once where the lane's `concurrency` is above 1, or after a call that timed out.
    """

    key: str
    """The name of the section of toolformer.toml and of the lane: `calculator`."""
    name: str
    """The tool's name in texts: `Calculator`."""
    version: str
    """Raise this when the same call would give another result; enters fingerprints."""
    defaults: ToolDefaults
    prompt: str
    """Instruction and examples of P(x) (appendix A.2), without the last `Input: x / Output:`."""
    description: str = ""
    """What the tool does, in a sentence, for models that get a list of their tools; see `about`."""
    Options: ClassVar[type[ToolOptions]] = ToolOptions
    """The keys that the tool's section may hold besides thresholds and limits."""
    Arguments: ClassVar[type[BaseModel] | None] = None
    """The named arguments of `[Weather(city="Rome", days=3)]`; None where a call takes one text, as in the paper."""
    asks_language: ClassVar[bool] = False
    """Whether `wants` uses `document.language`: fastText then identifies it (`en`) where the corpus names none.

    A corpus' own label is given as it is: `en`, `eng_Latn`.
    """
    looks_for: ClassVar[str] = "a text that the tool's rule wants"
    """What `wants_document` and `wants` look for in a document, for the message where no document has it."""
    by_paragraph: bool = False
    """Whether a text of the lane is one paragraph: `wants` is then asked about each of a segment's paragraphs."""
    routed: bool = False
    """Whether a text is the tool's only where it fits it better than most other routed tools (`Router`)."""
    server: str = ""
    """The server of `[servers.NAME]` that has the tool; its lanes are one group of the graph."""
    rule_version: ClassVar[str] = "1"
    """Raise this when `propose` gives other calls; no loss and no result is computed again."""
    kept_out_version: ClassVar[str] = ""
    """Raise this when `kept_out` gives other reasons; no loss and no result is computed again."""
    rule_looks_ahead: ClassVar[bool] = False
    """Whether `propose` gives `words`; the score of the lane is then what a call gains over its echo."""
    batch_size: int = 32
    """The most calls that `run` gets; 1 for a backend without batches."""

    def __init__(self, key: str, options: ToolOptions, prompt: str) -> None:
        self.key = key
        self.options = options
        self.prompt = prompt
        self.description = options.description or self.description

    @property
    def schema(self) -> Schema | None:
        """Return the JSON schema of the named arguments; None where a call takes one text."""
        return None if self.Arguments is None else self.Arguments.model_json_schema()

    def read(self, input: str) -> Any:
        """Return the arguments of a call as `run` gets them; None where a call takes one text. Raises BadArguments."""
        schema = self.schema
        if schema is None:
            return None
        arguments = read_arguments(input, schema)
        if self.Arguments is None:
            return arguments
        try:
            return self.Arguments.model_validate(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            raise BadArguments(f"bad_arguments: {'.'.join(map(str, first['loc']))} {first['type']}") from error

    @property
    def about(self) -> str:
        """Return what the tool does: a sentence of `description`, else of the class's docstring, else of the prompt.

        That is the first one, or the one that writes a call.
        """
        text = one_line((self.description or type(self).__doc__ or self.prompt)[:MOST_DESCRIBED])
        sentences = re.split(r"(?<=[.!?]) ", text.partition(" Input: ")[0])
        return next((sentence for sentence in sentences if f"[{self.name}(" in sentence), sentences[0])[:LONGEST_ABOUT]

    def wants_document(self, document: Document) -> str | None:
        """Return why the document is selected, or None to skip it; must be cheap. Raises OverBudget."""
        return "every_text"

    def wants(self, text: str, document: Document) -> str | None:
        """Return why a segment of a selected document is selected, or None to skip it. Raises OverBudget."""
        return "every_text"

    def context(self, document: Document) -> str:
        """Return what the result depends on besides the input; empty for every built-in tool but the calendar."""
        return ""

    def keeps(self, text: str, offset: int, input: str) -> bool:
        """Return whether to keep a call that passed the filter; it is written before character `offset` of `text`."""
        return True

    def kept_out(self, text: str, offset: int, input: str) -> str | None:
        """Return why a call may not stay whatever its delta, or None; by default what `keeps` says.

        A tool that names reasons of its own raises `kept_out_version` where they change.
        """
        return None if self.keeps(text, offset, input) else "tool_keeps_out"

    def propose(self, text: str, context: str) -> Iterable[Proposed]:
        """Return calls for a text by a rule (`proposals = ["rule"]`), those at one place by preference.

        Of calls with one result at a place the first is scored. `context`: that of the document. A tool that does not
        define this has no rule. Raises OverBudget.
        """
        return ()

    def rule_identity(self) -> Mapping[str, object]:
        """Return what determines `propose`, for fingerprints."""
        return {"rule": self.rule_version}

    def prepare(self, progress: Callable[[int], None]) -> None:  # noqa: B027 - most tools need no preparation
        """Do the first `run`'s preparation outside a call's time limit; report progress to `progress`."""

    def connect(self) -> None:  # noqa: B027 - most tools need no connection
        """Connect to the backend if not connected; called before every batch, outside its time limit.

        Raises RetryableError when it may succeed later, ToolDown when the tool as a whole cannot work.
        """

    def timed_out(self) -> None:  # noqa: B027 - most tools hold nothing that hangs
        """Release what may still hang; called after a batch exceeded its time limit. Must not raise.

        Where `concurrency` is above 1, other calls may be running. Calls that this ends must raise RetryableError.
        """

    @abstractmethod
    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return a result per call, in order. A bad input must give a reason and never raise.

        Raises RetryableError when the batch may succeed later, ToolDown when the tool as a whole cannot work.
        """

    def at_inference(self) -> "Tool":
        """Return the tool that answers a finetuned model: this one, unless other options hold then."""
        return self

    def identity(self) -> Mapping[str, object]:
        """Return what determines the results besides `version`, for fingerprints: all options but the prompt's."""
        return determining(self.options, but=tuple(ToolOptions.model_fields))

    def selection(self) -> Mapping[str, object]:
        """Return what determines which texts are selected, and their contexts, besides `version`: `identity`.

        Override this where `wants` uses an option that the results do not depend on.
        """
        return self.identity()


def schemas_of(tools: Mapping[str, Tool]) -> dict[str, Schema]:
    """Return the schemas of the tools with named arguments, by the tools' keys."""
    return {name: schema for name, tool in tools.items() if (schema := tool.schema) is not None}


@contextmanager
def blamed(tool: Tool, member: str) -> Iterator[None]:
    """Raise ToolDown, which names the tool and its member, where the block raises or exits the process.

    ToolDown, OverBudget and BadArguments pass: they are what a tool may raise. Another UserError gets the name of the
    section.
    """
    try:
        yield
    except (ToolDown, OverBudget, BadArguments):
        raise
    except UserError as error:
        raise ToolDown(f"[tools.{tool.key}] {error}") from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ToolDown(
            f"[tools.{tool.key}]: {type(tool).__name__}.{member} raised {described(error)}; fix it and run again"
        ) from error


def described(error: BaseException) -> str:
    """Return the type and message of an exception in a line, also where its own `__str__` fails."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        message = "its message cannot be shown"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


NO_OPERATION = "no_operation"
"""Why the calculator keeps out a call that computes nothing."""
QUOTES = (('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"), ("«", "»"))


def unquote(text: str) -> str:
    """Remove surrounding white space and a pair of quotes around the whole text.

    `"Hamlet" or "Macbeth"` stays unchanged; `"He said "hi" to me"` loses the outer pair.
    """
    stripped = text.strip()
    for opening, closing in QUOTES:
        if len(stripped) >= 2 and stripped.startswith(opening) and stripped.endswith(closing):
            inside = stripped[1:-1]
            return stripped if _apart(opening, closing).fullmatch(inside) else inside.strip()
    return stripped


@functools.cache
def _apart(opening: str, closing: str) -> re.Pattern[str]:
    """Match the inside of two quotations, `Hamlet" or "Macbeth`: its first quote closes, its last opens."""
    unquoted = rf"(?:[^{opening}{closing}]|(?<=\w)[{opening}{closing}](?=\w))*+"
    return re.compile(rf"{unquoted}(?<=\S){closing}(?!\w)(?:.*(?<!\w))?{opening}(?=\S){unquoted}", re.DOTALL)
