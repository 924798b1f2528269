"""What can go wrong with a language model, in words a person can act on."""

from toolformer_dag.errors import UserError


class ModelError(UserError):
    """A model that cannot be found, read or run. The message names it, the reason and the remedy."""


class OffsetError(UserError):
    """A character at which no token begins. `nearest` is the closest character at which one does."""

    def __init__(self, offset: int, nearest: int) -> None:
        super().__init__(f"no token begins at character {offset}; the nearest token boundary is character {nearest}")
        self.nearest = nearest
