"""The stages of the line, one declaration each, in the order of the data. Knows no Dagster."""
