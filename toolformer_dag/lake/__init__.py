"""The lake: immutable Parquet parts with the record of what made them, rows that are computed once, the warehouse."""
