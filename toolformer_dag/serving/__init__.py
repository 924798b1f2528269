"""Completing texts for many clients at once, and the server that they speak to."""
