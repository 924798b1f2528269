"""What is judged is a unit: the judge takes any that says what it is asked, and needs nothing that only calls have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.traces.conftest import settings_at
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage
from toolformer_dag.model.engine import Engine
from toolformer_dag.traces.judge import Judge
from toolformer_dag.traces.units import NO_UNIT_VARIANT, RECORDED_VARIANT, CallToJudge, UnitToJudge, iter_call_positions

TALK = (
    RecordedMessage("user", "How warm is it in Graz?"),
    RecordedMessage("assistant", "Graz has 17 degrees."),
    RecordedMessage("assistant", "It is 17 degrees."),
    RecordedMessage("user", "And in Lyon?"),
    RecordedMessage("assistant", "", (RecordedCall("warmth", {"town": "Lyon"}, number=(4, 0), result="23 degrees"),)),
    RecordedMessage("assistant", "23 degrees."),
)


@dataclass(frozen=True)
class MessageToJudge:
    """A message as a unit: it is held against the conversation without it, and is to help the next message alone."""

    messages: tuple[RecordedMessage, ...]
    message_index: int
    reason_not_judged: str | None = None

    @property
    def following_message_indexes(self) -> range:
        return range(self.message_index + 1, self.message_index + 2)

    @property
    def own_and_other_texts(self) -> Sequence[str]:
        return [self.messages[self.message_index].content]

    def build_replacements(
        self, unit_message: RecordedMessage, cut_text: Callable[[str], str]
    ) -> dict[str, Sequence[RecordedMessage]]:
        assert unit_message == self.messages[self.message_index]
        return {NO_UNIT_VARIANT: []}


def judge(engine: Engine, folder: Path) -> Judge:
    return Judge(settings_at(folder), engine=engine)


def test_a_unit_that_is_no_call_is_judged(engine: Engine, tmp_path: Path) -> None:
    unit: UnitToJudge = MessageToJudge(TALK, 1)
    [judged] = judge(engine, tmp_path).iter_judged_units([unit])
    assert judged.loss_by_variant.keys() == {NO_UNIT_VARIANT, RECORDED_VARIANT}
    assert (
        judged.delta == judged.loss_by_variant[NO_UNIT_VARIANT] - judged.loss_by_variant[RECORDED_VARIANT] > 0
    )  # it says the answer
    assert judged.other_text_count == 0
    assert judged.overlaps == (pytest.approx(2 / 4),)  # 17 and degrees of: it is 17 degrees


def test_only_the_words_that_a_unit_may_help_are_weighted(engine: Engine, tmp_path: Path) -> None:
    variants = judge(engine, tmp_path).variant_writer.write_variants(MessageToJudge(TALK, 1))
    assert isinstance(variants, dict)
    own = variants[RECORDED_VARIANT]
    weighted = engine.encoding.tokenizer.decode([own.token_ids[position] for position in own.weighted_positions])
    assert weighted.strip() == "It is 17 degrees."


def test_a_unit_says_why_it_is_not_judged(engine: Engine, tmp_path: Path) -> None:
    units = [MessageToJudge(TALK, 1, reason_not_judged="no_reason_at_all"), MessageToJudge(TALK, 2)]
    assert [judged.reason_not_judged for judged in judge(engine, tmp_path).iter_judged_units(units)] == [
        "no_reason_at_all",
        "nothing_follows",
    ]


def test_units_of_several_kinds_are_judged_together_as_each_alone(engine: Engine, tmp_path: Path) -> None:
    [position] = iter_call_positions(TALK)
    units: list[UnitToJudge] = [
        MessageToJudge(TALK, 1),
        CallToJudge(TALK, position.message_index, position.call_index, ("-3 degrees", "40 degrees")),
    ]
    together = list(judge(engine, tmp_path).iter_judged_units(units))
    for unit, judged in zip(units, together, strict=True):
        [alone] = judge(engine, tmp_path).iter_judged_units([unit])
        assert judged.loss_by_variant == pytest.approx(alone.loss_by_variant, abs=1e-5)
    assert together[1].other_text_count == 2
