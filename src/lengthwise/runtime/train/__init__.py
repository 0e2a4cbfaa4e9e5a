"""The training loop, and the execution of one step's plan."""
