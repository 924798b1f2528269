"""Write documents of the pretraining mix about the pretraining part of the synthetic world."""

import re
from dataclasses import replace
from functools import cache
from random import Random

from benchmarks.embedded_model.demonstrations import (
    PretrainingDocument,
    behind_calls,
    chain_instructions,
    content,
    demonstration,
    guessed_input,
    in_place,
    instruction,
    noisy_place,
    note,
    with_call,
    with_notes,
)
from toolformer_dag.synthetic.phenomena import NAMED_ARGUMENT_TOOLS, SYNTHETIC_TOOLS, TWO_HOP_KIND, write_phenomenon
from toolformer_dag.synthetic.sentences import CallWithResult, Phenomenon, write_filler_paragraph
from toolformer_dag.synthetic.web import write_document_text
from toolformer_dag.synthetic.wordings import ENTITY_KINDS, WORLD_PARTS, Relation, get_relations, get_word_list
from toolformer_dag.synthetic.world import World

LARGEST_SHARE = 0.3  # of a text's plain words
LARGEST_SHARE_OF_SUMS = 0.5
LARGEST_SHARE_OF_QUESTIONS = 0.8  # whose words the call repeats, whatever they ask
CONTRACTED = re.compile(r"(?<=what|here)'s\b|(?<=who)'s\b", re.IGNORECASE)
PLAIN_WORD = re.compile(r"(?<![\w'\"])[a-z]{2,}(?![\w'])")
KEPT = frozenset(("answer", "is"))  # "The answer is" ends the questions of evaluation too
KEPT_SUMS = 0.7  # of the sums keep the words that tell the operation
DATE_WORDS = frozenset(("day", "weekday", "week", "month", "year", "date", "full", "complete"))  # they ask for a form


def blurred(random: Random, gold: Phenomenon) -> Phenomenon:
    """Replace some plain words before the place; a question inside the input changes with them.

    Names, numbers and, for translation, the foreign words stay.
    """
    asked = gold.input.strip('"')
    quoted = repeats_question(gold)
    largest = LARGEST_SHARE_OF_QUESTIONS if quoted else LARGEST_SHARE
    share = random.random() * (LARGEST_SHARE_OF_SUMS if gold.tool == "calculator" else largest)
    own = {"machine_translation": set(asked.split()), "calendar": DATE_WORDS}
    if random.random() < KEPT_SUMS:
        own["calculator"] = set(get_word_list("calculator", "operation_words"))
    kept = KEPT | own.get(gold.tool, set())
    words = [word for word in dict.fromkeys(PLAIN_WORD.findall(gold.text_before_call)) if word not in kept]
    known = _words_of_questions() if quoted else _words()
    others = {word: random.choice(known) for word in words if random.random() < share}

    def exchanged(text: str) -> str:
        return PLAIN_WORD.sub(lambda hit: others.get(hit[0], hit[0]), text)

    changed = f'"{exchanged(asked)}"' if quoted else gold.input
    return replace(gold, text_before_call=exchanged(gold.text_before_call), input=changed)


def repeats_question(gold: Phenomenon) -> bool:
    """Return whether the call repeats a question of the text."""
    return gold.tool == "question_answering" and gold.input.strip('"') in gold.text_before_call


@cache
def _words() -> tuple[str, ...]:
    lists = ("persons", "groups", "verbs", "places", "adverbials", "remarks")
    texts = [text for name in lists for text in get_word_list("filler", name)]
    return tuple(sorted({word for text in texts for word in PLAIN_WORD.findall(text)}))


@cache
def _words_of_questions() -> tuple[str, ...]:
    """Return plain words, and those of questions about all relations: the call repeats whatever is asked."""
    asked = [question for kind in ENTITY_KINDS for relation in get_relations(kind) for question in relation.questions]
    return tuple(sorted({*_words(), *(word for text in asked for word in PLAIN_WORD.findall(text.replace("{e}", "")))}))


def wrong_input(random: Random, gold: Phenomenon) -> str:
    """Return a similar input that asks for something else; the calendar has only one input."""
    if gold.tool in NAMED_ARGUMENT_TOOLS:
        return _wrong_arguments(random, gold.input)
    if gold.wording_name.startswith(TWO_HOP_KIND):
        return _wrong_sum(random, gold.input) if gold.tool == "calculator" else gold.earlier_calls[-1].input
    if gold.tool == "calculator":
        return _wrong_sum(random, gold.input)
    if gold.tool == "machine_translation":
        words = gold.input.split()
        return random.choice((words[-1], " ".join(words[:2]), " ".join(gold.text_before_call.split()[:3])))
    if gold.tool == "calendar":
        return gold.input
    return _wrong_question(random, gold)


def _wrong_arguments(random: Random, asked: str) -> str:
    """Exchange the towns, or ask for another number or day."""
    values = re.findall(r'"([^"]*)"', asked)
    if asked.startswith("start"):
        return asked.replace(values[0], "\0").replace(values[1], values[0]).replace("\0", values[1])
    return re.sub(r"count=\d+", f"count={random.randint(2, 60)}", asked)


def _wrong_sum(random: Random, expression: str) -> str:
    if "(" in expression:
        return expression.replace("(", "").replace(")", "")
    a, operator, b, *rest = expression.split(" ")
    if rest:  # a share in percent
        return random.choice((f"{a} * {b}", f"{b} / {a}", f"{a} / 100"))
    other = random.choice([sign for sign in "+-*/" if sign != operator])
    turned = [f"{b} {operator} {a}"] if operator in "-/" else []
    return random.choice((*turned, f"{a} {other} {b}", f"{a} {operator} {_another(random, a, b)}"))


def _another(random: Random, *numbers: str) -> int:
    return random.choice([number for number in range(2, 100) if str(number) not in numbers])


def _wrong_question(random: Random, gold: Phenomenon) -> str:
    kind, key = gold.wording_name.split("/")[1:3]
    own = next(get_relations(entity_kind) for entity_kind in ENTITY_KINDS if entity_kind == kind)
    name = next(_name(gold.input.strip('"'), relation) for relation in own if relation.key == key)
    other = random.choice(own)
    if gold.tool == "question_answering":
        return f'"{other.question.format(e=name)}"'
    return random.choice((f'"{name}"', f'"{name} {other.keyword}"'))


def _name(asked: str, relation: Relation) -> str:
    templates = (f"{{e}} {relation.keyword}", relation.question, *relation.questions)
    plain = CONTRACTED.sub(" is", asked)
    for before, after in (template.split("{e}", 1) for template in templates):
        if plain.casefold().startswith(before.casefold()) and plain.endswith(after):
            return plain[len(before) : len(plain) - len(after)]
    return asked


TOOL_WEIGHTS = {
    "calculator": 13,
    "calendar": 5,
    "question_answering": 15,
    TWO_HOP_KIND: 9,
    "wiki_search": 8,
    "machine_translation": 4,
    "distance": 4,
    "price": 2,
}
DEMONSTRATED = tuple(tool for tool in TOOL_WEIGHTS if tool != TWO_HOP_KIND)
CHAIN_SHARE = 0.3  # of the demonstrations: calls behind the results of others
FIRST_HOP_SHARE = 0.2  # of the texts for question answering: they take two calls, of which the first is shown
SINGLE_SHARE = 0.45  # of the examples with calls behind calls: one call is enough
SIBLINGS = {"question_answering": "wiki_search", "wiki_search": "question_answering"}  # they know the same facts
SIBLING_SHARE = 0.7  # of the texts without a place for such a tool
PLACE_SHARE = 0.7  # of the texts shown in a demonstration
WRONG_INPUT = 0.12
BLURRED_SHARE = 0.25
BLURRED_SUMS = 0.45  # their numbers are to be found, and questions to be repeated, whatever the words are
# Shares of the texts in a row of them; the rest have no note.
TOLD_SHARE = 0.8
WRONG_SHARE = 0.1
ALONE_SHARE = 0.75  # of the examples: their texts are one phenomenon, so that calls make up much of a demonstration


def some(random: Random, world: World, tool: str | None = None) -> Phenomenon:
    """Draw a phenomenon of a tool, or of any tool."""
    gold = write_phenomenon(random, world, tool or _any_tool(random), "pretraining", "seen")
    if gold.earlier_calls or gold.tool in NAMED_ARGUMENT_TOOLS:  # every word before the place says what is asked
        return gold
    share = BLURRED_SUMS if gold.tool == "calculator" or repeats_question(gold) else BLURRED_SHARE
    return blurred(random, gold) if random.random() < share else gold


def _any_tool(random: Random) -> str:
    return random.choices(list(TOOL_WEIGHTS), list(TOOL_WEIGHTS.values()))[0]


def of_any_part(random: Random, world: World) -> str:
    """Draw a phenomenon of any tool and any part, with input and result, to train the tokenizer on."""
    tool = random.choice((*SYNTHETIC_TOOLS, *NAMED_ARGUMENT_TOOLS, TWO_HOP_KIND))
    gold = write_phenomenon(random, world, tool, random.choice(WORLD_PARTS), "seen")
    return f"{gold.text} {gold.input} {gold.result}"


def page(random: Random, golds: list[Phenomenon]) -> str:
    """Write a text around phenomena: alone, among plain sentences, or a whole page of the small web."""
    draw = random.random()
    if draw < 0.15:
        return write_document_text(random, golds)
    texts = [gold.text for gold in golds]
    if draw < 0.5:
        texts.insert(random.randint(0, len(texts)), write_filler_paragraph(random, 1))
    return " ".join(texts)


def plain(random: Random, world: World) -> PretrainingDocument:
    """Write a page without notes."""
    if random.random() < 0.15:
        return (write_filler_paragraph(random, random.randint(2, 5)),)
    return (page(random, [some(random, world) for _ in range(random.randint(1, 2))]),)


def note_then_text(random: Random, world: World) -> PretrainingDocument:
    """Write a note and a page that may use it."""
    count = random.choice((1, 1, 2))
    golds = [some(random, world) for _ in range(count)]
    text = page(random, golds)
    notes = [note(random, gold, text) for gold in golds if not gold.earlier_calls]
    is_of_same_tool = random.random() < 0.5
    distractor = some(random, world, golds[0].tool if is_of_same_tool else None)
    return with_notes(random, text, notes, [content(random, distractor)])


def noted(random: Random, world: World) -> PretrainingDocument:
    """Write short texts in a row; most have a note right before the words it tells, some a wrong note or none."""
    pieces: list[str] = []
    for _ in range(random.randint(3, 8)):
        gold = some(random, world)
        draw = random.random()
        told = gold if draw < TOLD_SHARE else some(random, world, gold.tool)
        known = [in_place(random, gold, told)] if draw < TOLD_SHARE + WRONG_SHARE else []
        pieces += [f" {gold.text_before_call}" if pieces else gold.text_before_call, *known, gold.text_after_call]
    return tuple(pieces)


def told_before(random: Random, world: World) -> PretrainingDocument:
    """Write a note, then the short text that uses it, as e(c, r) stands before x when calls are judged."""
    gold = some(random, world, random.choice((*SYNTHETIC_TOOLS, *NAMED_ARGUMENT_TOOLS, TWO_HOP_KIND, TWO_HOP_KIND)))
    return in_place(random, gold, gold), gold.text


YEAR_FORMS = (
    " {y} ({y} - {z})",
    " {y} [Calculator({y} - {z})",
    " in {y}, ({z} - {y})",
    " {z} to {y} ({y})",
    " {y} [{y}]",
    " {y} = '{y}'",
)


def spelled_years(random: Random, world: World) -> PretrainingDocument:
    """Write years twice: behind a space a year is one token, behind a bracket or a quotation mark its four digits."""
    form = random.choice(YEAR_FORMS)
    return ("".join(form.format(y=random.randint(1900, 2039), z=random.randint(1700, 2039)) for _ in range(12)),)


def annotated(random: Random, world: World, tool: str, *, alone: bool) -> tuple[str, list[str]]:
    """Draw a phenomenon, `alone` or on a page, and annotate it with a noisy call; most have a place for the tool."""
    has_place = random.random() < PLACE_SHARE
    golds = [_of_tool(random, world, tool) if has_place else some(random, world, _other(random, tool))]
    if not alone and random.random() < 0.3:
        golds.append(some(random, world, _other(random, tool)))
    text = golds[0].text if alone else page(random, golds)
    gold = text.index(golds[0].text) + len(golds[0].text_before_call) if has_place else None
    offset = noisy_place(random, text, gold)
    asked = None if offset is None else _input(random, golds[0], tool, text[:offset])
    if offset is None or asked is None:
        return text, [text]
    return text, with_call(text, offset, tool, asked)


def _of_tool(random: Random, world: World, tool: str) -> Phenomenon:
    """Draw a phenomenon of a tool; some of question answering's take two calls, of which the first is asked."""
    if tool != "question_answering" or random.random() >= FIRST_HOP_SHARE:
        return some(random, world, tool)
    gold = some(random, world, TWO_HOP_KIND)
    first = gold.earlier_calls[0]
    return replace(gold, tool=first.tool, input=first.input, result=first.result, earlier_calls=())


def behind_a_call(random: Random, world: World, *, alone: bool) -> tuple[str, list[str]]:
    """Draw a text with one call and its result, and where it takes more calls, the next one behind it."""
    gold = some(
        random, world, random.choice(("question_answering", "calculator")) if _is_single(random) else TWO_HOP_KIND
    )
    text = gold.text if alone else page(random, [gold])
    place = text.index(gold.text) + len(gold.text_before_call)
    if not gold.earlier_calls:
        return text, behind_calls(text, place, [CallWithResult(gold.tool, gold.input, gold.result)], None)
    calls = (*gold.earlier_calls, CallWithResult(gold.tool, gold.input, gold.result))
    done = random.randint(1, len(calls) if random.random() < 0.2 else len(calls) - 1)
    if done == len(calls):  # the chain is whole: nothing follows
        return text, behind_calls(text, place, calls, None)
    following = calls[done]
    is_wrong = done == len(calls) - 1 and random.random() < WRONG_INPUT
    asked = wrong_input(random, gold) if is_wrong else following.input
    return text, behind_calls(text, place, calls[:done], (following.tool, asked))


def _is_single(random: Random) -> bool:
    return random.random() < SINGLE_SHARE


def demonstrate(random: Random, world: World) -> PretrainingDocument:
    """Write three to seven examples for a tool, or of calls behind calls."""
    if random.random() < CHAIN_SHARE:
        count = random.randint(3, 6)
        chains = [behind_a_call(random, world, alone=random.random() < ALONE_SHARE) for _ in range(count)]
        return demonstration(random, random.choice(chain_instructions()), chains)
    weights = [TOOL_WEIGHTS[tool] for tool in DEMONSTRATED]
    [tool] = random.choices(DEMONSTRATED, weights)
    count = random.randint(3, 7)
    are_alone = [random.random() < ALONE_SHARE for _ in range(count)]
    examples = [annotated(random, world, tool, alone=is_alone) for is_alone in are_alone]
    return demonstration(random, instruction(random, tool), examples)


def _other(random: Random, tool: str) -> str:
    if tool in SIBLINGS and random.random() < SIBLING_SHARE:
        return SIBLINGS[tool]
    return random.choice([one for one in (*SYNTHETIC_TOOLS, *NAMED_ARGUMENT_TOOLS) if one != tool])


def _input(random: Random, gold: Phenomenon, tool: str, before: str) -> str | None:
    if gold.tool != tool:
        return guessed_input(random, tool, before)
    if gold.wording_name.startswith(TWO_HOP_KIND):  # its first call
        return gold.input
    return wrong_input(random, gold) if random.random() < WRONG_INPUT else gold.input
