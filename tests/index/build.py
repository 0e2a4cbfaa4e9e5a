"""Small corpora and their indexes."""

import json
from pathlib import Path

from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings
from lengthwise.index.store import TokenStore, open_index

SMALL_UNIT = 4096
"""Bytes: many work units from little text."""


def build(source: Path, out: Path, *, workers: int = 1, restart: bool = False, **settings) -> TokenStore:
    settings.setdefault("unit_bytes", SMALL_UNIT)
    build_index(IndexSettings(source=source, **settings), out, workers=workers, restart=restart)
    return open_index(out)


def write_jsonl(path: Path, texts: list, *, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def write_tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def texts_of(store: TokenStore) -> list[bytes]:
    """What a byte-tokenized index holds, without the end-of-sequence tokens."""
    return [bytes(token for token in store.tokens(id).tolist() if token < 256) for id in range(len(store))]


def places_of(store: TokenStore) -> list[dict]:
    return [json.loads(line) for line in (store.path / "documents.jsonl").read_text().splitlines()]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
