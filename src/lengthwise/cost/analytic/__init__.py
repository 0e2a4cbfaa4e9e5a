"""Cost from closed forms: FLOPs, bytes and link speeds."""
