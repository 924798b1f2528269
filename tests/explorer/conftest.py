"""A finished line of the pipeline, for what asks the model."""

from tests.pipeline.conftest import finished, model_folder, new_line

__all__ = ["finished", "model_folder", "new_line"]
