"""One phenomenon of the made world: text with a place at which a tool's call belongs."""

from random import Random

from toolformer_dag.embedded.fact import fact
from toolformer_dag.embedded.gold import Phenomenon
from toolformer_dag.embedded.names import Part
from toolformer_dag.embedded.relation import WordingSet
from toolformer_dag.embedded.story import story
from toolformer_dag.embedded.today import today
from toolformer_dag.embedded.translation import translated
from toolformer_dag.embedded.world import World

__all__ = ["TOOLS", "Phenomenon", "phenomenon"]

TOOLS = ("calculator", "calendar", "wiki_search", "question_answering", "machine_translation")


def phenomenon(random: Random, world: World, tool: str, part: Part, wordings: WordingSet) -> Phenomenon:
    """A phenomenon for `tool` (a lane's key) about the entities, numbers, dates or words of `part`."""
    if tool == "calculator":
        return story(random, part, wordings)
    if tool == "calendar":
        return today(random, part, wordings)
    if tool == "machine_translation":
        return translated(random, part, wordings)
    if tool in ("question_answering", "wiki_search"):
        return fact(random, world, tool, part, wordings)
    raise ValueError(f"no phenomenon for tool {tool!r}: one of {', '.join(TOOLS)}")
