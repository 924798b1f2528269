"""The tools, their options and prompts, and the runner that executes calls."""
