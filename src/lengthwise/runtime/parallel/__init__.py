"""How p devices share a layer: one file per method, one boundary layout for all of them."""
