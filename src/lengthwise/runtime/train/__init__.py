"""The training loop and its facade."""
