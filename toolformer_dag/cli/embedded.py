"""`toolformer-dag embedded`: write the small web that the embedded model reads."""

from pathlib import Path
from typing import Annotated

import typer

from toolformer_dag.cli.terminal import path

app = typer.Typer(help="Write the small web that the embedded model reads.", no_args_is_help=True)


@app.command()
def web(
    folder: Annotated[Path, typer.Argument(parser=path, help="Where the shards are written.")],
    shards: Annotated[int, typer.Option(min=1, help="Files to write.")] = 2,
    documents: Annotated[int, typer.Option(min=1, help="Documents in all.")] = 1200,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 1,
) -> None:
    """Write the small web as CCNet shards.

    Example: toolformer-dag embedded web web/ --shards 4 --documents 10000
    """
    from toolformer_dag.synthetic.web import write_shards

    for shard in write_shards(folder, shards, documents, seed):
        typer.echo(shard)
