"""The language-model work: positions, samples and losses, for any causal LM of the hub."""
