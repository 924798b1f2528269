"""Bring tables up to date: what a stage declares, which rows are missing, and the workers that compute them."""
