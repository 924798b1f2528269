"""Evaluate a model with and without tools: benchmarks, accuracy, perplexity (paper, sections 4.2 and 4.3)."""
