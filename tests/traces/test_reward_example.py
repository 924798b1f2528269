"""The example of the reward: a policy that is paid by the gain alone learns the call that fits."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward.py"


@pytest.mark.long
def test_twenty_steps_with_the_gain_alone_teach_the_right_call(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line and line[0] != "{")
    earned = {act: float(told[act].split()[0]) for act in ("right", "wrong", "needless", "none")}
    assert earned["right"] > 0.3 > 0 == earned["none"] > max(earned["wrong"], earned["needless"])
    before, after = (ast.literal_eval(told[when]) for when in ("before", "after"))
    assert after["right"] > before["right"] + 0.1
