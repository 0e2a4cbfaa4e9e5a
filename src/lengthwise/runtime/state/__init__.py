"""Optimization layout, pull and push, optimizer, checkpoint."""
