"""Batched language-model work: position probabilities, sampled calls and losses."""
