"""Policies that choose a parallel method per layer (ParaDySe)."""
