"""Measuring a model with and without its tools: questions, rules, accuracy, perplexity (paper, section 4.2 and 4.3)."""
