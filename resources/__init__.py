"""What the assets reach for: the shared instance, what is stale, and the runs that mend it."""
