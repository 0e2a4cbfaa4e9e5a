"""The nouns: frozen dataclasses and pure functions on them."""
