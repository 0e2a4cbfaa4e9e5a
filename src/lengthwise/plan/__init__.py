"""Who computes what, and how."""
