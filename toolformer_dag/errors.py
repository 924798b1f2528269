"""The mistakes that a person can mend: every such error names the thing, the reason and the remedy."""


class UserError(Exception):
    """Base of the errors that the command line shows as one message, without a traceback."""
