"""Decoding with tools: the model calls a tool inside a sentence and continues (paper, sections 2 and 4.2)."""
