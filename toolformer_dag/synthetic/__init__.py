"""Provide the synthetic world, its small web and the embedded model, which need no download."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER / "model"
SMALL_MODEL = FOLDER / "model_small"
"""A smaller model, for tests."""
WRITTEN = ("Calculator", "Calendar", "WikiSearch", "QA", "MT", "Distance", "Price")
"""The names that the embedded model was trained to write, and writes whatever the prompt says."""
PROMPTS = FOLDER / "prompts"
"""The prompts P(x) of the synthetic world, one file per tool."""
