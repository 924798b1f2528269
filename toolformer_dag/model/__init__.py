"""The language model: positions, samples and losses, many texts and prefixes in one batch."""
