"""The synthetic world, its small web and the embedded model: everything runs from here with no download."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER / "model"
SMALL_MODEL = FOLDER / "model_small"
"""For tests."""
PROMPTS = FOLDER / "prompts"
"""The prompts P(x) of this world, one per tool."""
