"""Notes: something that is known, and then a text that uses it. This is how the model learns to read e(c, r).

No note looks like a call with its result: none holds a tool's name, and brackets and arrow never come together.
"""

from random import Random

from toolformer_dag.embedded.gold import Phenomenon
from toolformer_dag.embedded.training.document import Document

TAGS = ["Note", "Info", "Ref", "Box", "Fact", "Data", "Hint", "Memo", "Link", "Page", "See", "Key"]
EQUALS = (" = ", ": ", " is ", " - ", " -> ", " ... ")
RELEVANT_SHARE = 0.78  # of the texts; the rest have only a note about something else
SECOND_SHARE = 0.3


def note(random: Random, gold: Phenomenon) -> str:
    """What a call at the gold place would bring in, as a note, with a space before it."""
    return " " + wrapped(random, content(random, gold))


def content(random: Random, gold: Phenomenon) -> str:
    """Input and result in one line; the date and a search result stand for themselves."""
    asked = gold.input.strip('"')
    if gold.tool == "calendar" or (gold.tool == "wiki_search" and random.random() < 0.4):
        return gold.result
    return f"{asked}{random.choice(EQUALS)}{gold.result}"


def wrapped(random: Random, known: str) -> str:
    """The content in brackets of any kind (square ones only without an arrow), behind a tag, or bare."""
    draw, tag = random.random(), random.choice(TAGS)
    if draw < 0.25:
        return f"({known})"
    if draw < 0.5:
        return f"{tag}: {known}" if draw < 0.4 else f"{tag}({known})"
    if draw < 0.7:
        return f"<{known}>" if draw < 0.6 else "{" + known + "}"
    if draw < 0.9 and "->" not in known and "[" not in known:
        return f"[{known}]"
    return known if known.endswith(".") else known + "."


def with_notes(random: Random, text: str, own: list[str], other: list[str]) -> Document:
    """A relevant note before most texts, another one before some; the text follows at once, as x follows e(c, r)."""
    chosen = [random.choice(own)] if own and random.random() < RELEVANT_SHARE else []
    if other and (not chosen or random.random() < SECOND_SHARE):
        chosen.append(random.choice(other))
    random.shuffle(chosen)
    notes = "".join(chosen)
    return (f"{notes} {text}",) if random.random() < 0.3 else (notes, text)
