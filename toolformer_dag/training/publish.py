"""Putting a finished model folder in its place."""

import shutil
from pathlib import Path

from toolformer_dag.storage.files import sync


def publish(folder: Path, out: Path) -> None:
    """`folder` becomes `out`: everything is on disk before a rename makes it visible.

    Between putting an old folder aside and the rename there is a moment with none; never one with half a model.
    """
    for file in folder.iterdir():
        sync(file)
    sync(folder)
    aside = out.with_name(f"{out.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if out.exists():
        out.rename(aside)
    folder.rename(out)
    sync(out.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove_partial(out: Path) -> None:
    """Every unfinished run beside `out`: a published one makes them pointless."""
    for folder in out.parent.glob(f"{out.name}.partial-*"):
        shutil.rmtree(folder, ignore_errors=True)
