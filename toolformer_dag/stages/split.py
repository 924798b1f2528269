"""Which documents are held out: the same for every tool and every run, whatever other documents there are."""

from hashlib import blake2b

TRAIN, HELDOUT = "train", "heldout"


def split_of(digest: str, heldout_share: float) -> str:
    """train or heldout, by a hash of the document's digest; about `heldout_share` of all documents are held out."""
    number = int.from_bytes(blake2b(f"split {digest}".encode(), digest_size=8).digest(), "big")
    return HELDOUT if number < heldout_share * 2**64 else TRAIN
