"""Damage as disks do it: one flipped bit, with or without times that tell of it."""

import random
import time
from pathlib import Path

from toolformer_dag import identity


def flip(file: Path, chance: random.Random) -> None:
    """Flip one bit in place: somebody may still have the file mapped."""
    with file.open("r+b") as stream:
        place = chance.randrange(file.stat().st_size)
        stream.seek(place)
        [byte] = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << chance.randrange(8)]))


def rot(file: Path, chance: random.Random) -> None:
    """Flip one bit as a disk does that gives back other bits under the same times: what was hashed stays remembered."""
    known = identity.read_remembered_hashes(file)
    flip(file, chance)
    identity.remember_hashes(file, known)
    while not identity.has_settled_times(file.stat()):
        time.sleep(0.001)
