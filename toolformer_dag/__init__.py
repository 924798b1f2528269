"""Toolformer (Schick et al. 2023) as a typed library; only `definitions` knows Dagster."""
