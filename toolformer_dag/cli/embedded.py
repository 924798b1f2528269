"""`toolformer-dag embedded`: the made web and the model that come with the package."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="The made web and the embedded model: write, train, evaluate.", no_args_is_help=True)


@app.command()
def web(
    folder: Annotated[Path, typer.Argument(help="Where the shards are written.")],
    shards: Annotated[int, typer.Option(help="Files to write.")] = 2,
    documents: Annotated[int, typer.Option(help="Documents in each.")] = 600,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 1,
) -> None:
    """Write the small web as CCNet shards.

    Example: toolformer-dag embedded web web/ --shards 4 --documents 2500
    """
    from toolformer_dag.embedded.web import write_shards

    for path in write_shards(folder, shards, documents, seed):
        typer.echo(path)
