"""Training data out: C* and the warehouse as Hugging Face data sets."""

from collections.abc import Mapping
from typing import Literal

FormName = Literal["text", "masked", "preference", "chat", "functions"]
"""The forms of C* as training data. `FORM_BUILDERS` in corpus_export.py builds them by these names."""
FORM_DESCRIPTIONS: Mapping[FormName, str] = {
    "text": "calls inline, and the text without them",
    "masked": "token ids; results have the label -100",
    "preference": "pairs for DPO",
    "chat": "messages and tools; re-shaped, not filtered in this form",
    "functions": "a row per call, as JSON",
}
"""What each form is, for `export --help`."""
TOKENIZED_FORMS: tuple[FormName, ...] = ("masked", "chat")
"""The forms that a tokenizer has a say in."""
