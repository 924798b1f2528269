"""The name under which everything that was computed for a text is found again."""

from hashlib import blake2b


def text_digest(text: str) -> str:
    """32 hexadecimal characters of BLAKE2b over the text in UTF-8: equal texts share what was paid for."""
    return blake2b(text.encode(), digest_size=16).hexdigest()
