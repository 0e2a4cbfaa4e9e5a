"""Make any `nn.Module` compute shards of packs exactly."""
