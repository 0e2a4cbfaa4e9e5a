"""The version of this package, where modules below its public names can read it; and the digest of its source."""

from hashlib import blake2b
from pathlib import Path

__version__ = "0.1.0"


def source_digest() -> str:
    """Digest of this package's modules: two checkouts of one version may differ. Takes a tenth of a second."""
    package, state = Path(__file__).parents[1], blake2b(digest_size=4)
    for path in sorted(package.rglob("*.py")):
        state.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return state.hexdigest()
