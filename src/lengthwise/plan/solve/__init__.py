"""Bin packing and scheduling with no word of this domain inside."""
