"""Tools: one folder per tool, and what all of them share."""
