"""Immutable part files, rows that are never paid for twice, and the warehouse over them. Knows no Dagster."""
