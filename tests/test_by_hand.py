"""examples/by_hand.py, which a newcomer reads first: short, and it keeps the right call where it belongs."""

import runpy
from pathlib import Path

import pytest

from toolformer_dag.texts.calls import take_out

EXAMPLE = Path(__file__).parents[1] / "examples" / "by_hand.py"


def test_the_example_goes_from_a_text_to_the_text_with_its_call(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))
    steps = [step.splitlines() for step in capsys.readouterr().out.split("\n\n")]
    assert [step[0][:2] for step in steps] == ["1.", "2.", "3.", "4.", "5."]
    text, written = steps[0][1], steps[-1][1]
    assert "in total there were [Calculator(137 + 48) -> 185] 185 hens." in written
    assert take_out(written, ["Calculator"]) == text
    assert any(line.startswith("p = ") for line in steps[1]) and "137 + 48 -> 185" in steps[2]
    assert any("delta = " in line for line in steps[3])


def test_the_example_stays_short() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 60
