"""The prompt P(x) of a tool: an instruction and a few examples of texts with calls (appendix A.2)."""

import re
from dataclasses import dataclass
from pathlib import Path

from toolformer_dag.embedded.folder import PROMPTS
from toolformer_dag.errors import UserError
from toolformer_dag.settings.values import under
from toolformer_dag.texts.call import MalformedCall, parse_call
from toolformer_dag.texts.splice import take_out

EMBEDDED = "embedded"
_CALL_START = re.compile(r"\[(?=[^\s\[\]()]+\()")


class PromptError(UserError):
    """A prompt that cannot teach its tool: the message names the file, the example, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A text, and the same text with calls. `number` counts from 1."""

    number: int
    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A parsed prompt.txt."""

    instruction: str
    examples: tuple[PromptExample, ...]


def read_prompt(key: str, folder: Path, option: str | None, root: Path) -> tuple[str, Path]:
    """The prompt's text and its file: `option` (against `root`), the made world's, or prompt.txt of the tool's folder.

    Raises PromptError for a file that cannot be read.
    """
    source = _prompt_file(key, folder, option, root)
    try:
        return source.read_text("utf-8").strip() + "\n", source
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{source}: the prompt cannot be read ({error}); set prompt = to a UTF-8 file") from error


def _prompt_file(key: str, folder: Path, option: str | None, root: Path) -> Path:
    if option is None:
        return folder / "prompt.txt"
    if option == EMBEDDED:
        return PROMPTS / f"{key}.txt"
    return under(root, option)


def parse_prompt(text: str, source: Path) -> Prompt:
    """Split at lines that begin with `Input:` and `Output:`; a text may go over several lines.

    Raises PromptError where an Input has no Output, or there is no instruction or no example.
    """
    instruction, *blocks = re.split(r"^Input:", text, flags=re.MULTILINE)
    if not instruction.strip():
        raise PromptError(f"{source}: no instruction before the first 'Input:' line; say what the calls are for")
    if not blocks:
        raise PromptError(f"{source}: no example; add a few pairs of lines 'Input: ...' and 'Output: ...'")
    return Prompt(instruction, tuple(_example(block, number, source) for number, block in enumerate(blocks, 1)))


def _example(block: str, number: int, source: Path) -> PromptExample:
    parts = re.split(r"^Output:", block, flags=re.MULTILINE)
    if len(parts) != 2 or not all(part.strip() for part in parts):
        raise PromptError(f"{source}: example {number}: write one 'Input: text' line and one 'Output: text' line")
    return PromptExample(number, parts[0].strip(), parts[1].strip())


def check_prompt(text: str, name: str, source: Path) -> Prompt:
    """The parsed prompt, when its calls parse, carry `name`, and give the Input back when they are taken out.

    Raises PromptError. Not covered: whether the inputs of the calls make sense to the tool.
    """
    prompt = parse_prompt(text, source)
    calls = sum(_check_example(example, name, source) for example in prompt.examples)
    if not calls:
        raise PromptError(f"{source}: no example holds a call; write some as [{name}(input)]")
    return prompt


def _check_example(example: PromptExample, name: str, source: Path) -> int:
    where = f"{source}: example {example.number}"
    bodies = [example.output[start.end() :].partition("]")[0] for start in _CALL_START.finditer(example.output)]
    for body in bodies:
        _check_call(body, name, where)
    left = take_out(" " + example.output, {name}).strip()  # a call may stand before the first word
    if left != example.input:
        raise PromptError(
            f"{where}: without its calls the Output reads {left!r}, not the Input {example.input!r}; "
            "make both the same text, and write each call with one space before it"
        )
    return len(bodies)


def _check_call(body: str, name: str, where: str) -> None:
    try:
        tool = parse_call(body).tool
    except MalformedCall as error:
        raise PromptError(f"{where}: [{body}] is no call ({error}); write it as [{name}(input)]") from error
    if tool != name:
        raise PromptError(f"{where}: [{body}] calls {tool!r}, but this tool's name is {name!r}; rename the call")
