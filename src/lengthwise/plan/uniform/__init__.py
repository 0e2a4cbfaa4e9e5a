"""Policies that use equal pipelines."""
