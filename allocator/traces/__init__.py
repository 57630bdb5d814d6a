"""Recorded runs: reading them, and replaying them."""
