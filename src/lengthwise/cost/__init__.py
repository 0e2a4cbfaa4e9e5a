"""Seconds and bytes of a scheme."""
