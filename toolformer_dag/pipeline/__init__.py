"""The stages of the line, one declaration each; chunks, workers and the update of a table. Knows no Dagster."""
