"""Where the shipped model, the small model of the tests and the made world's prompts lie."""

from pathlib import Path

EMBEDDED = Path(__file__).resolve().parent
MODEL = EMBEDDED / "model"
SMALL_MODEL = EMBEDDED / "model_small"
PROMPTS = EMBEDDED / "prompts"
