"""Parallel methods, by which p ranks share a layer: one file each, all with the same token layout at its boundary."""
