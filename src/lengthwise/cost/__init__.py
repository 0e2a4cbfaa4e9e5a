"""Cost models: seconds and bytes of a micro-batch under a parallel configuration."""
