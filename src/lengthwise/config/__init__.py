"""Settings of runs and of prepared models."""
