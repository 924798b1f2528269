"""Inputs that ask for something else than the text: what the filter has to find in the demonstrations."""

from random import Random

from toolformer_dag.embedded.gold import Phenomenon
from toolformer_dag.embedded.relation import Relation
from toolformer_dag.embedded.relations import RELATIONS


def wrong_input(random: Random, gold: Phenomenon) -> str:
    """An input like the right one that asks for something else; the calendar has only one."""
    if gold.tool == "calculator":
        return _wrong_sum(random, gold.input)
    if gold.tool == "machine_translation":
        words = gold.input.split()
        return random.choice((words[-1], " ".join(words[:2]), " ".join(gold.before.split()[:3])))
    if gold.tool == "calendar":
        return gold.input
    return _wrong_question(random, gold)


def _wrong_sum(random: Random, expression: str) -> str:
    a, operator, b = expression.split(" ")
    other = random.choice([sign for sign in "+-*/" if sign != operator])
    turned = [f"{b} {operator} {a}"] if operator in "-/" else []
    return random.choice((*turned, f"{a} {other} {b}", f"{a} {operator} {_another(random, a, b)}"))


def _another(random: Random, *numbers: str) -> int:
    return random.choice([number for number in range(2, 100) if str(number) not in numbers])


def _wrong_question(random: Random, gold: Phenomenon) -> str:
    kind, key = gold.wording.split("/")[1:3]
    relations = next(found for name, found in RELATIONS.items() if name == kind)
    name = next(_name(gold.input.strip('"'), relation) for relation in relations if relation.key == key)
    other = random.choice(relations)
    if gold.tool == "question_answering":
        return f'"{other.question.format(e=name)}"'
    return random.choice((f'"{name}"', f'"{name} {other.keyword}"'))


def _name(asked: str, relation: Relation) -> str:
    templates = (f"{{e}} {relation.keyword}", relation.question, *relation.questions)
    for before, after in (template.split("{e}", 1) for template in templates):
        if asked.startswith(before) and asked.endswith(after):
            return asked[len(before) : len(asked) - len(after)]
    return asked
