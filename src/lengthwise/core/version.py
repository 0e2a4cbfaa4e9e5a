"""The version of this package, where modules below its public names can read it."""

__version__ = "0.1.0"
