"""One-device Transformers over packed sequences: the reference that every parallel execution must equal."""
