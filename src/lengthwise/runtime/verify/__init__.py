"""Check before training that packs, shards and recompute give the stock model's gradients."""
