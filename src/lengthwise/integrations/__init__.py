"""Adapters for training loops of other libraries."""
