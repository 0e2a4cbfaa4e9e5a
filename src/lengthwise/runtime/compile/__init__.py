"""torch.compile for a fixed set of shapes: compiled before the first step, counted ever after."""
