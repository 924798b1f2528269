"""The interface of a tool: its name, the texts it selects, and how it answers a batch of calls."""

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ValidationError

from toolformer_dag.files import UserError
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.texts.arguments import BadArguments, Schema, parse_arguments
from toolformer_dag.texts.calls import to_single_line
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.options import ToolOptions

LOST_REASON_PREFIX: Final = "lost:"
"""What begins the reason of a lost call: one that failed by accident and may succeed later."""
MAX_SUMMARY_CHARACTERS = 300
"""The most characters of `Tool.summary`, which models read."""
MAX_SUMMARY_SOURCE_CHARACTERS = 10_000
"""The most characters of a description, docstring or prompt in which `Tool.summary` looks for a sentence."""


class ToolDown(UserError):
    """The tool as a whole cannot work, and its lane stops. The message names the tool, the reason and the remedy."""


class RetryableError(RuntimeError):
    """Raised by `Tool.run` when the same batch may succeed later: a lost connection, a busy server."""


class OverBudget(Exception):
    """Raised by `Tool.wants_document`, `Tool.wants` and `Tool.propose` for a text that costs too much work.

    A rule may only spend a certain number of steps on a text. The document, or the text, is left out then and counted
    under the reason `over_budget`.
    """


class WorkBudget:
    """The number of steps that a rule may take for one text.

    Steps are counted, not seconds, so that fast and slow machines leave out the same texts.
    """

    def __init__(self, steps: int) -> None:
        self._steps_left = steps

    def spend(self, steps: int) -> None:
        """Take a number of steps from the budget. Call this before doing the work.

        Raises:
            OverBudget: Fewer steps are left.
        """
        self._steps_left -= steps
        if self._steps_left < 0:
            raise OverBudget


@dataclass(frozen=True, slots=True)
class ToolDefaults:
    """The settings of a tool in the paper (table in section 4.1), which its section of toolformer.toml may change.

    Attributes:
        tau_s: The least probability that the model gives to the beginning of a call, where calls are sampled.
        k: The most positions of a text at which calls are sampled.
        m: The most calls that are sampled at each of these positions.
        tau_f: By how much a call has to lower the loss of the words after it to pass the filter.
    """

    tau_s: float
    k: int
    m: int
    tau_f: float


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as `Tool.run` gets it.

    Attributes:
        input: The text between the parentheses of `[Calculator(400 / 1400)]`.
        context: What the result depends on besides the input (`Tool.context`). This is the document's ISO date for the
            calendar, and empty for the other built-in tools.
        arguments: The named arguments in `input`, an instance of `Tool.Arguments`, or None if a call takes one text.
            They follow from `input`, so they do not count when calls are compared.
    """

    input: str
    context: str = ""
    arguments: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to a call: a text, or a short reason why there is none.

    Attributes:
        result: The text, or None if there is none.
        reason: Why there is no text, or None if there is one. Reasons are counted, so they are short and stable:
            `no_answer`, `division_by_zero`.
        seconds: How long the call took. If the tool does not say so, this is 0, and the runner measures it.
        cost: What the call cost, in the currency in which the backend reports it, or None if it does not.

    Raises:
        ValueError: Both or neither of result and reason are given.
    """

    result: str | None
    reason: str | None = None
    seconds: float = 0.0
    cost: float | None = None

    def __post_init__(self) -> None:
        if (self.result is None) == (self.reason is None):
            raise ValueError(f"a tool result is either a text or a reason: {self.result!r}, {self.reason!r}")

    @property
    def lost(self) -> bool:
        """Whether the call failed by accident (time limit, connection, exception) and may succeed later."""
        return self.reason is not None and self.reason.startswith(LOST_REASON_PREFIX)


@dataclass(frozen=True, slots=True)
class ProposedCall:
    """A call that a rule proposes for a text, in place of a language model.

    Attributes:
        offset: The call is inserted before this character of the text.
        input: The input of the call.
        words: What the text says after the call, if the rule has looked ahead, else empty. Only a result that holds
            these words counts, and its loss must be below that of an echo: the result of the call whose input is
            `words`.
    """

    offset: int
    input: str
    words: str = ""


NO_ANSWER = ToolResult(None, "no_answer")
"""The result of a question that the passages do not answer."""


class NoResult(Exception):
    """Raised within a tool where a call has no result.

    Attributes:
        reason: Why there is no result. Reasons are counted, so it is short and stable, such as `division_by_zero`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Tool(ABC):
    """A tool that texts can call. Derive from this class to bring a tool of your own.

    A subclass sets `name`, `version` and `defaults` and defines `run`; everything else has a default. Most tools also
    define `wants`, which selects the texts for which calls are worth trying.

    >>> from toolformer_dag.tools.tool import Tool, ToolDefaults, ToolResult, unquote
    >>>
    >>> class Reverser(Tool):
    ...     '''Spells a word backwards.'''
    ...
    ...     name = "Reverse"
    ...     version = "1"
    ...     defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    ...
    ...     def wants(self, text, document):
    ...         return "says_backwards" if "backwards" in text else None
    ...
    ...     def run(self, calls):
    ...         results = []
    ...         for call in calls:
    ...             word = unquote(call.input)
    ...             if word.isalpha():
    ...                 results.append(ToolResult(word[::-1]))
    ...             else:
    ...                 results.append(ToolResult(None, "not_a_word"))
    ...         return results

    With the class in `my_tools.py` beside toolformer.toml, this section makes it a tool of the run:

        [tools.reverse]
        use = "my_tools:Reverser"
        examples = [
            'Read backwards, "stressed" is [Reverse(stressed)] "desserts".',
            'Spelled backwards, "live" becomes [Reverse(live)] "evil".',
        ]

    To try it without a run:

    >>> from toolformer_dag.tools.options import ToolOptions
    >>> from toolformer_dag.tools.tool import ToolCall
    >>>
    >>> tool = Reverser(key="reverse", options=ToolOptions(), prompt="")
    >>> tool.run([ToolCall("stressed")])[0].result
    'desserts'
    >>> tool.run([ToolCall("4 + 4")])[0].reason
    'not_a_word'

    Construction must be cheap and must not import torch: load weights and indexes in `prepare` or the first `run`.
    Several threads call `run` at once where the section's `concurrency` is above 1, and after a call that timed out.
    A lane, below, is one tool with its settings: the stages of a run from texts to filtered calls, for this tool.
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
    """What the tool does, in a sentence, for models that get a list of their tools; see `summary`."""
    Options: ClassVar[type[ToolOptions]] = ToolOptions
    """The keys that the tool's section may hold besides thresholds and limits."""
    Arguments: ClassVar[type[BaseModel] | None] = None
    """The named arguments of `[Weather(city="Rome", days=3)]`; None if a call takes one text, as in the paper."""
    asks_language: ClassVar[bool] = False
    """Whether `wants` uses `document.language`: fastText then identifies it (`en`) where the corpus names none.

    A corpus' own label is given as it is: `en`, `eng_Latn`.
    """
    looks_for: ClassVar[str] = "a text that the tool's rule wants"
    """What `wants_document` and `wants` look for in a document, for the message where no document has it."""
    dated: ClassVar[bool] = False
    """Whether the context of a call is a date, as 2023-01-30, or empty; requests with another context are refused."""
    by_paragraph: bool = False
    """Whether a text of the lane is one paragraph: `wants` is then asked about each of a segment's paragraphs."""
    is_routed: bool = False
    """Whether a text is the tool's only where it fits the tool better than most other routed tools (`Router`)."""
    server_name: str = ""
    """The MCP server of `[servers.NAME]` that has the tool; the lanes of a server are one group of the asset graph."""
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
    def arguments_schema(self) -> Schema | None:
        """The JSON schema of the named arguments; None if a call takes one text."""
        if self.Arguments is None:
            return None
        return self.Arguments.model_json_schema()

    def parse_call_input(self, input: str) -> Any:
        """Parse a call's named arguments: the input `city="Rome", days=3` becomes `Arguments(city="Rome", days=3)`.

        Args:
            input: The text between the parentheses of the call.

        Returns:
            An instance of the tool's class `Arguments`; a dictionary if the tool has a schema but no such class, as
            tools of MCP servers have; None if calls take one text.

        Raises:
            BadArguments: The arguments cannot be parsed, or do not fit the schema.
        """
        schema = self.arguments_schema
        if schema is None:
            return None

        arguments = parse_arguments(input, schema)
        if self.Arguments is None:
            return arguments

        try:
            return self.Arguments.model_validate(arguments)
        except ValidationError as error:
            raise BadArguments(_describe_first_mistake(error)) from error

    @property
    def summary(self) -> str:
        """What the tool does, in a sentence of at most MAX_SUMMARY_CHARACTERS, for prompts and lists of tools.

        It is the first sentence of `description`, the class's docstring, or the prompt, whichever comes first and is
        not empty. A sentence with a call, such as "You can call it by writing [Weather(city)].", is preferred.
        """
        source = self.description or type(self).__doc__ or self.prompt
        text = to_single_line(source[:MAX_SUMMARY_SOURCE_CHARACTERS])
        before_examples, _, _ = text.partition(" Input: ")  # the examples of a prompt begin with this word
        sentences = re.split(r"(?<=[.!?]) ", before_examples)

        # In a prompt, the sentence with the form of a call says the most about the tool.
        sentences_with_call = [sentence for sentence in sentences if f"[{self.name}(" in sentence]
        best_sentences = sentences_with_call or sentences
        return best_sentences[0][:MAX_SUMMARY_CHARACTERS]

    def wants_document(self, document: Document) -> str | None:
        """Return why calls are worth trying in a document, or None to skip it. This must be cheap.

        The reason is a short word, such as "date_in_url", by which documents are counted.

        Raises:
            OverBudget: The document costs too much work.
        """
        return "every_text"

    def wants(self, text: str, document: Document) -> str | None:
        """Return why calls are worth trying in a text, or None to skip it.

        By default every text is tried. A tool that helps in few texts overrides this, so that the model has less to do.

        Args:
            text: A segment of a selected document.
            document: This document.

        Raises:
            OverBudget: The text costs too much work.
        """
        return "every_text"

    def context(self, document: Document) -> str:
        """Return what the results of calls in a document depend on besides their input, such as the document's date.

        It is empty for every built-in tool but the calendar.
        """
        return ""

    def keeps(self, text: str, offset: int, input: str) -> bool:
        """Return whether to keep a call that passed the filter.

        Args:
            text: The text.
            offset: The call is written before this character of the text.
            input: The input of the call.
        """
        return True

    def kept_out(self, text: str, offset: int, input: str) -> str | None:
        """Return why a call is left out although it passed the filter, or None to keep it.

        By default the reason is `tool_keeps_out` if `keeps` returns False. A subclass with other reasons gets a higher
        number as its `kept_out_version` when they change.

        Args:
            text: The text.
            offset: The call is written before this character of the text.
            input: The input of the call.
        """
        return None if self.keeps(text, offset, input) else "tool_keeps_out"

    def propose(self, text: str, context: str) -> Iterable[ProposedCall]:
        """Return the calls that a rule proposes for a text, for a section with `proposals = ["rule"]`.

        Calls at the same offset come in order of preference. A tool that does not define this has no rule.

        Args:
            text: The text.
            context: What results depend on besides the input (see `Tool.context`).

        Raises:
            OverBudget: The text costs too much work.
        """
        return ()

    def rule_identity(self) -> Mapping[str, object]:
        """Return what determines the calls of `propose`, for fingerprints."""
        return {"rule": self.rule_version}

    def prepare(self, progress: Callable[[int], None]) -> None:  # noqa: B027 - most tools need no preparation
        """Load or build what `run` needs, outside the time limits of calls.

        Args:
            progress: May be called with the number of things done so far, such as passages indexed.
        """

    def connect(self) -> None:  # noqa: B027 - most tools need no connection
        """Connect to the backend if not connected. This is called before every batch, outside its time limit.

        Raises:
            RetryableError: Connecting may succeed later.
            ToolDown: The tool as a whole cannot work.
        """

    def timed_out(self) -> None:  # noqa: B027 - most tools hold nothing that hangs
        """Release what may still hang, after a batch exceeded its time limit. This must not raise.

        Where `concurrency` is above 1, other calls may be running. Calls that this ends must raise RetryableError.
        """

    @abstractmethod
    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return a result per call, in order. A bad input must give a reason and never raise.

        Raises:
            RetryableError: The same batch may succeed later.
            ToolDown: The tool as a whole cannot work.
        """

    def at_inference(self) -> "Tool":
        """Return the tool that answers a finetuned model; by default this one."""
        return self

    def identity(self) -> Mapping[str, object]:
        """Return what determines the results besides `version`, for fingerprints: all options but the prompt's."""
        return select_determining_settings(self.options, excluded_keys=tuple(ToolOptions.model_fields))

    def selection(self) -> Mapping[str, object]:
        """Return what determines which texts are selected, and their contexts, besides `version`; default `identity`.

        Override this where `wants` uses an option that the results do not depend on.
        """
        return self.identity()


def collect_argument_schemas(tools: Mapping[str, Tool]) -> dict[str, Schema]:
    """Return the JSON schemas of the tools that take named arguments, by the keys of `tools`.

    Tools whose calls take one text are left out.
    """
    schema_by_name: dict[str, Schema] = {}
    for name, tool in tools.items():
        schema = tool.arguments_schema
        if schema is not None:
            schema_by_name[name] = schema
    return schema_by_name


def find_context_fault(context: str, tools: Iterable[Tool]) -> str | None:
    """Find out what is wrong with the context of calls to these tools.

    A dated tool, such as the calendar, needs an ISO date or an empty context. Other tools accept any text.

    Returns:
        A message such as "'soon' is no date", or None if nothing is wrong.
    """
    if not context:
        return None

    needs_date = any(tool.dated for tool in tools)
    if not needs_date:
        return None

    try:
        date.fromisoformat(context)
    except ValueError:
        return f"{context[:40]!r} is no date; write year, month and day, as in 2023-01-30"
    return None


@contextmanager
def wrap_tool_errors(tool: Tool, member_name: str) -> Iterator[None]:
    """Turn exceptions of a tool's code in the `with` block into ToolDown, with a message that names the tool.

    ToolDown, OverBudget and BadArguments are not changed.

    Args:
        tool: The tool.
        member_name: The method or attribute that the block uses, for the message.

    Raises:
        ToolDown: The block raised an exception.
    """
    try:
        yield
    except (ToolDown, OverBudget, BadArguments):
        raise
    except UserError as error:
        raise ToolDown(f"[tools.{tool.key}] {error}") from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ToolDown(
            f"[tools.{tool.key}]: {type(tool).__name__}.{member_name} raised {describe_exception(error)}; "
            "fix it and run again"
        ) from error


def describe_exception(error: BaseException) -> str:
    """Return the type and message of an exception on one line, such as `ValueError: no such city`.

    This never raises, even if the `__str__` of the exception does.
    """
    type_name = type(error).__name__
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        message = "its message cannot be shown"
    return f"{type_name}: {message}" if message else type_name


NO_OPERATION_REASON = "no_operation"
"""Why the calculator keeps out a call that computes nothing."""
QUOTE_PAIRS = (('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"), ("«", "»"))
"""Pairs of an opening and a closing quotation mark."""


def unquote(text: str) -> str:
    """Remove surrounding white space and a pair of quotation marks around the whole text.

    - `"Hamlet"` becomes `Hamlet`.
    - `"Hamlet" or "Macbeth"` stays unchanged: its first and last mark are no pair.
    - `"He said "hi" to me"` loses the outer pair.
    """
    stripped_text = text.strip()

    for opening_mark, closing_mark in QUOTE_PAIRS:
        has_both_marks = stripped_text.startswith(opening_mark) and stripped_text.endswith(closing_mark)
        is_enclosed = has_both_marks and len(stripped_text) >= 2  # a single mark begins and ends itself
        if not is_enclosed:
            continue

        inside = stripped_text[1:-1]
        two_quotations_pattern = _build_two_quotations_pattern(opening_mark, closing_mark)
        if two_quotations_pattern.fullmatch(inside):
            return stripped_text
        return inside.strip()

    return stripped_text


@functools.cache
def _build_two_quotations_pattern(opening: str, closing: str) -> re.Pattern[str]:
    """Return a pattern for the inside of a text that is two quotations, not one: `Hamlet" or "Macbeth`.

    The outer marks are cut off already. `He said "hi" to me` does not match: its first mark opens a quotation.

    Args:
        opening: The opening quotation mark.
        closing: The closing quotation mark, which may be the same character.
    """
    # In `Hamlet" or "Macbeth` the five parts match `Hamlet`, `"`, ` or `, `"` and `Macbeth`.
    apostrophe = rf"(?<=\w)[{opening}{closing}](?=\w)"  # a mark between two letters, as in `don't`, is part of a word
    # Possessive (`*+`): what matched is not tried again in other ways, so matching takes linear time.
    quoted = rf"(?:[^{opening}{closing}]|{apostrophe})*+"
    closing_mark = rf"(?<=\S){closing}(?!\w)"  # right after a visible character, and before no letter: `Hamlet" or`
    between = r"(?:.*(?<!\w))?"  # nothing, or a text that does not end in a letter: ` or `
    opening_mark = rf"{opening}(?=\S)"  # right before a visible character: `"Macbeth`
    return re.compile(f"{quoted}{closing_mark}{between}{opening_mark}{quoted}", re.DOTALL)


def _describe_first_mistake(error: ValidationError) -> str:
    """Return the reason of BadArguments for arguments that pydantic refuses: "bad_arguments: days missing"."""
    first_mistake = error.errors()[0]
    argument_path = ".".join(str(step) for step in first_mistake["loc"])  # such as "days", or "range.start"
    return f"bad_arguments: {argument_path} {first_mistake['type']}"
