"""One number per sequence of an index, computed by all ranks: its length, a model's loss, a function of the user's."""
