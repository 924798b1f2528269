"""Web archives, WARC and WET -> a refusal: their records are pages with headers, and no reader takes the text yet."""

from collections.abc import Iterable, Iterator

from toolformer_dag.texts.columns import Batch
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.shard_faults import ShardFault

MAGIC = b"WARC/"
"""The first bytes of a web archive."""
FORMAT = "dclm"
"""The format with the keys that its records are to have: {"text": "...", "metadata": {"WARC-Record-ID": "..."}}."""


def refuse_web_archive(content: Iterable[bytes], choice: FormatChoice) -> Iterator[Batch]:
    """Raise ShardFault web_archive, with the remedy. choice: always FORMAT, which `choose_layout` takes."""
    remedy = "convert it to JSON lines first (docs: Your own corpus)"
    raise ShardFault("web_archive", f"the shard is a WARC or WET file; {remedy}")
