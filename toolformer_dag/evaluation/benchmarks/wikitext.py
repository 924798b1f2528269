"""WikiText, for perplexity (section 4.3)."""

import re
from pathlib import Path

from toolformer_dag.evaluation.benchmarks.source import BenchmarkError

BLANK = "\n \n"
TITLE = re.compile(rf"(?<={BLANK})(?= = [^=\n].*[^=] = {BLANK})")  # an equation on a line of its own has text around it


def wikitext(file: Path) -> list[str]:
    """The articles of a `.txt` file as they stand, tokenized words and `<unk>` included; each begins with its title.

    Raises BenchmarkError for a file that cannot be read or holds no text.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # a byte-order mark is no content
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{file} cannot be read ({error}); give wiki.test.tokens or its like") from error
    articles = [article for article in TITLE.split(BLANK + text) if article.strip()]
    if not articles:
        raise BenchmarkError(f"{file} holds no text; give wiki.test.tokens or its like")
    return articles
