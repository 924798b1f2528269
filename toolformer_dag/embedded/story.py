"""Stories with a number to be worked out."""

from collections.abc import Mapping
from random import Random

from toolformer_dag.embedded.arithmetic import apply, operands, written
from toolformer_dag.embedded.gold import Phenomenon
from toolformer_dag.embedded.names import FIRST_NAMES, Part, name_pool
from toolformer_dag.embedded.relation import WordingSet
from toolformer_dag.embedded.wordings import sums
from toolformer_dag.embedded.wordings.calendar import WEEK_DAYS

QUESTION_SHARE = 0.45


def story(random: Random, part: Part, wordings: WordingSet) -> Phenomenon:
    """A story whose last number is the result of one operation on two numbers in it."""
    schemes = sums.SCHEMES if wordings == "seen" else sums.UNSEEN_SCHEMES
    scheme = random.choice(random.choice(schemes))
    a, b = operands(random, part, scheme.operation, scheme.numbers)
    slots = _slots(random, part) | {"a": written(random, a), "b": written(random, b)}
    setup = random.randrange(len(scheme.setups))
    is_question = random.random() < QUESTION_SHARE
    ends = scheme.questions if is_question else scheme.endings
    end = random.randrange(len(ends))
    template = scheme.setups[setup] + (f". {ends[end]} The answer is" if is_question else ends[end])
    result = apply(a, scheme.operation, b)
    return Phenomenon(
        tool="calculator",
        before=template.format(**slots),
        after=f" {result}" + random.choice(sums.TAILS).format(unit=scheme.unit.format(**slots), m=slots["m"]),
        input=_expression(scheme.operation, template, slots),
        result=result,
        answer=result,
        wording=f"calculator/{scheme.operation} {scheme.name}/{wordings}/{setup}.{'q' if is_question else 'e'}{end}",
        is_question=is_question,
    )


def _expression(operation: str, template: str, slots: Mapping[str, str]) -> str:
    """The operands of a sum or product in the order in which the text names them."""
    swapped = operation in "+*" and template.index("{b}") < template.index("{a}")
    first, second = ("b", "a") if swapped else ("a", "b")
    return f"{slots[first]} {operation} {slots[second]}"


def _slots(random: Random, part: Part) -> dict[str, str]:
    n, m = random.sample(FIRST_NAMES, 2)
    t, u, w = random.sample(name_pool("town", part), 3)
    day, other = random.sample(WEEK_DAYS, 2)
    lists = {"it": sums.THINGS, "box": sums.CONTAINERS, "event": sums.EVENTS, "gets": sums.GETS, "loses": sums.LOSES}
    chosen = {slot: random.choice(words) for slot, words in lists.items()}
    return chosen | {"n": n, "m": m, "t": t, "u": u, "w": w, "day": day, "other": other}
