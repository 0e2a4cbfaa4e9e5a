"""Hugging Face model configurations and parameter names; no torch."""
