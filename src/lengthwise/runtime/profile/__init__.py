"""Measures a model on this device."""
