"""Phenomena: what stands at a gold place, and the wordings that lead up to it."""

import re
from random import Random

import pytest

from toolformer_dag.synthetic.names import PARTS
from toolformer_dag.synthetic.phenomena import TOOLS, phenomenon
from toolformer_dag.synthetic.sentences import Phenomenon
from toolformer_dag.synthetic.wordings import word_list
from toolformer_dag.synthetic.world import World


def _draw(world: World, tool: str, wordings: str, n: int = 1500) -> list[Phenomenon]:
    random = Random(f"{tool} {wordings}")
    return [phenomenon(random, world, tool, random.choice(PARTS), wordings) for _ in range(n)]


@pytest.mark.parametrize("wordings", ["seen", "unseen"])
@pytest.mark.parametrize("tool", TOOLS)
def test_the_answer_begins_what_follows_the_place(world: World, tool: str, wordings: str) -> None:
    for one in _draw(world, tool, wordings):
        assert one.tool == tool
        assert one.after.startswith(f" {one.answer}")
        assert one.after[len(one.answer) + 1] in ".,; "
        assert one.before[0].isalnum() or one.before[0] in "\"'"
        assert not one.before.endswith(" ")
        assert one.answer in one.result
        assert not set("{}[]\0\n") & set(one.text + one.input + one.result)
        assert (one.date is not None) == (tool == "calendar")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_hundred_wordings_and_some_held_out(world: World, tool: str) -> None:
    seen = {one.wording for one in _draw(world, tool, "seen", 8000)}
    unseen = {one.wording for one in _draw(world, tool, "unseen", 2000)}
    assert len(seen) >= 100
    assert len(unseen) >= 20
    assert not seen & unseen


@pytest.mark.parametrize("tool", TOOLS)
def test_unseen_wordings_are_other_sentences(world: World, tool: str) -> None:
    """No unseen text is a seen text with other names: what is left of both without names and numbers differs."""
    seen = {_shape(one) for one in _draw(world, tool, "seen")}
    assert not seen & {_shape(one) for one in _draw(world, tool, "unseen")}


def _shape(one: Phenomenon) -> str:
    words = one.before.split()
    small = [word for word in words if word[:1].islower() or word.endswith("?")]
    return " ".join(word for word in small if word.strip("?.,") not in one.input)


@pytest.mark.parametrize("tool", TOOLS)
def test_statements_and_questions(world: World, tool: str) -> None:
    drawn = _draw(world, tool, "seen")
    asked = [one.before for one in drawn if re.search(r"[/.]q\d", one.wording)]
    assert 0.3 < len(asked) / len(drawn) < 0.6
    leads = set(word_list("answers", "leads")) - {""}
    led = {text: next((lead for lead in leads if text.endswith(lead)), "") for text in asked}
    assert set(led.values()) == leads | {""}
    assert all(text.removesuffix(lead).rstrip().endswith(("?", ".")) for text, lead in led.items())


def test_an_unknown_tool_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="no phenomenon for tool 'telescope'"):
        phenomenon(Random(0), world, "telescope", "corpus", "seen")


def test_quotes_stand_around_questions_and_search_terms_only(world: World) -> None:
    for tool in TOOLS:
        quoted = tool in ("question_answering", "wiki_search")
        assert all(
            one.input.startswith('"') == one.input.endswith('"') == quoted or not one.input
            for one in _draw(world, tool, "seen", 50)
        )


def test_the_form_of_a_date_follows_from_the_wording(world: World) -> None:
    forms: dict[str, set[str]] = {}
    for one in _draw(world, "calendar", "seen"):
        form = "".join("0" if sign.isdigit() else "a" if sign.isalpha() else sign for sign in one.answer)
        while "aa" in form or "00" in form:
            form = form.replace("aa", "a").replace("00", "0")
        forms.setdefault(one.wording, set()).add(form)
    assert all(len(found) == 1 for found in forms.values())


def test_results_of_translation_are_lower_case(world: World) -> None:
    assert all(one.result == one.result.lower() for one in _draw(world, "machine_translation", "seen"))
