"""Which texts the calculator looks at (paper, appendix A.1)."""

from hashlib import blake2b

from toolformer_dag.tools.calculator.numbers import Number, holds_operation, numbers

PHRASES = ("=", "equals", "equal to", "total of", "average of")
BETWEEN = " $€£¥(+-−~≈"
LOOK_BACK = 24
ONE_OF = 100


def wanted(text: str, whole: str) -> str | None:
    """The first rule that `text` meets: "operation" (i), "phrase" (ii), "three_numbers" (iii); None without one.

    (i) `holds_operation`; (ii) `=`, `equals`, `equal to`, `total of` or `average of` before a number, with a currency
    or another sign between them or not, and white space of any kind; (iii) three numbers, for
    1 % of the documents, picked by a hash of `whole`, the document's text, so that a document and its segments are
    picked together.
    """
    found = numbers(text)
    if len(found) >= 3 and holds_operation(text, found):
        return "operation"
    if any(_after_phrase(text, number) for number in found):
        return "phrase"
    return "three_numbers" if len(found) >= 3 and _picked(whole) else None


def _after_phrase(text: str, number: Number) -> bool:
    before = text[max(0, number.start - LOOK_BACK) : number.start]
    return " ".join(before.lower().split()).rstrip(BETWEEN).endswith(PHRASES)


def _picked(whole: str) -> bool:
    digest = blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % ONE_OF == 0
