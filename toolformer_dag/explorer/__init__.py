"""The page over the warehouse: which calls were kept and why. Knows no Dagster; only reads."""
