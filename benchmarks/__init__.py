"""Speed, side by side with a naive way. LOG.md holds the experiments."""
