"""Is a model better that is trained on what `judge` keeps? `python -m benchmarks.cleaning`."""
