"""Shared value types: frozen dataclasses and pure functions on them, without torch."""
