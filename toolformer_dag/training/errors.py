"""What can go wrong in finetuning, in words a person can act on."""

from toolformer_dag.errors import UserError


class TrainingError(UserError):
    """A finetuning run that cannot start or go on. The message names the thing, the reason and the remedy."""
