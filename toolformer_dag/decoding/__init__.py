"""Decoding with tools: a model calls a tool in the middle of a sentence and goes on (paper, sections 2 and 4.2)."""
