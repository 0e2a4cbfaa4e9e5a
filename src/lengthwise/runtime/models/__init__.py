"""One-device Transformers over packs: the right-hand side of every equality."""
