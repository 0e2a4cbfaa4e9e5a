"""Any model: one's own ``nn.Module`` or one of Hugging Face, on token shards of dynamic degree."""
