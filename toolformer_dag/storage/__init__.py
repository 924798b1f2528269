"""Immutable part files, rows that are never paid for twice, and the warehouse. Knows no stage and no Dagster."""
