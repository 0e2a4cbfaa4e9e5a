"""Sharded training state: parameter all-gather (pull), gradient reduce-scatter (push), optimizer, checkpoints."""
