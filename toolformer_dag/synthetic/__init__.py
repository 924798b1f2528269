"""Provide the synthetic world, its small web and the embedded model, which need no download."""

from pathlib import Path

SYNTHETIC_FOLDER = Path(__file__).resolve().parent
EMBEDDED_MODEL_FOLDER = SYNTHETIC_FOLDER / "model"
SMALL_MODEL_FOLDER = SYNTHETIC_FOLDER / "model_small"
"""A smaller model, for tests."""
TRAINED_TOOL_NAMES = ("Calculator", "Calendar", "WikiSearch", "QA", "MT", "Distance", "Price")
"""The names that the embedded model was trained to write, and writes whatever the prompt says."""
PROMPT_FOLDER = SYNTHETIC_FOLDER / "prompts"
"""The prompts P(x) of the synthetic world, one file per tool."""
