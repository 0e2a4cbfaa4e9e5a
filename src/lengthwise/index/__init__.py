"""Build and open an index: token sequences on disk with their lengths."""
