"""Policies with heterogeneous pipelines (Hydraulis)."""
