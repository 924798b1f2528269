"""Training data out: C* and the warehouse as Hugging Face data sets."""

from typing import Literal

FormName = Literal["text", "masked", "preference", "chat", "functions"]
"""The forms of C* as training data; `FORMS` in corpus_export.py has them by these names."""
TOKENIZED: tuple[FormName, ...] = ("masked", "chat")
"""The forms that a tokenizer has a say in."""
