"""One function per stage: reads its inputs from the lake, computes what is missing, publishes. Knows no Dagster."""
