"""Train Transformers on sequences of any length at the speed the lengths allow."""

__version__ = "0.1.0"
