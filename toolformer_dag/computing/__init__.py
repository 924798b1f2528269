"""Bring tables up to date: what a stage declares, which rows are lacking, and the workers that compute them."""
