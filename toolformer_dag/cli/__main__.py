"""`python -m toolformer_dag.cli`: the same as `toolformer-dag`."""

from toolformer_dag.cli import app

app()
