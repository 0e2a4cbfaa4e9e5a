"""A pytest plugin that makes importing torch or anything built on it an error: ``pytest -p tests.no_torch``."""

import sys

for name in ("torch", "transformers", "accelerate", "safetensors"):
    sys.modules[name] = None  # type: ignore[assignment]  # importing a module that is None raises ImportError
