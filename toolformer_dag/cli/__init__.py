"""`toolformer-dag`: one file per command or group; each knows the library, and imports what is heavy when it runs."""

from toolformer_dag.cli.app import app

__all__ = ["app"]
