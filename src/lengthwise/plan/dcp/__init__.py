"""Policies of data-centric parallel (DCP)."""
