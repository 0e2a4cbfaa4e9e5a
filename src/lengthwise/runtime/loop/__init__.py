"""Prepared runs: steps of a user's own training loop."""
