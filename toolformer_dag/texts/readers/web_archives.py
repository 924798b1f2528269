"""Web archives, WARC and WET -> a refusal: their records are pages with headers, and no reader takes the text yet."""

from collections.abc import Iterable, Iterator

from toolformer_dag.texts.columns import Batch
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.shard_faults import ShardFault

WARC_MAGIC = b"WARC/"
"""The first bytes of a web archive."""
WARC_FORMAT_NAME = "dclm"
"""The format with the keys that its records are to have: {"text": "...", "metadata": {"WARC-Record-ID": "..."}}."""


def refuse_web_archive(blocks: Iterable[bytes], format_choice: FormatChoice) -> Iterator[Batch]:
    """Refuse a web archive, because no reader takes the text of its pages yet.

    The parameters are those of the other readers. They are not used.

    Raises:
        ShardFault: Always (web_archive).
    """
    remedy = "convert it to JSON lines first (docs: Your own corpus)"
    raise ShardFault("web_archive", f"the shard is a WARC or WET file; {remedy}")
