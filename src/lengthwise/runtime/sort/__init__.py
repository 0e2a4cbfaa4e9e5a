"""Sorts rows that are spread over ranks: exact shares of the exact order, for any input."""
