"""What transformers reads of a model beside its weights, kept in the folder of a run from its start."""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lengthwise.config.run_config import load_saved
from lengthwise.core.atomic_write import new_folder, shown
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import MAX_DOCUMENT_BYTES, read_json
from lengthwise.core.run_folder import RunFolder
from lengthwise.index.store import TokenStore

CONFIG, _TOKENIZER, _TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".index.json",
)  # fmt: skip
_OF_TOKENIZERS = ("tokenizer", "vocab", "spiece", "sentencepiece")
_PLACES = ("*", "additional_chat_templates/*")
# What tokenizers call these tokens where no tokenizer_config.json says it.
_CUSTOMARY = {
    "bos_token": ("<s>", "<bos>", "<|begin_of_text|>"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>"),
    "unk_token": ("<unk>", "[UNK]"),
}


def keep_model_files(folder: RunFolder, hf: str, store: TokenStore) -> list[str]:
    """Copy configuration and tokenizer into the run's folder, unless they are there: a run may outlive their source.

    They are all small files of ``hf``, the folder that the model starts from; where it has no tokenizer, or there is no
    such folder, the tokenizer of the index.

    Returns:
        The names of files that were left out because they are too large.
    """
    if folder.model_files.is_dir():
        return []
    files = small_files(Path(hf)) if hf else {}
    too_large = [name for name, path in files.items() if path.stat().st_size > MAX_DOCUMENT_BYTES]
    if not any(name.startswith(_OF_TOKENIZERS) for name in files) and (store.path / _TOKENIZER).is_file():
        files[_TOKENIZER] = store.path / _TOKENIZER
    if not files:
        return []
    with new_folder(folder.model_files, setting="run_folder") as partial:
        copy_files(files, partial, leave_out=too_large)
        if (partial / _TOKENIZER).is_file() and not (partial / _TOKENIZER_CONFIG).exists():
            _write_tokenizer_config(partial, eos_token=store.info["tokenizer"].get("eos_token", ""))
    return too_large


def small_files(folder: Path) -> dict[str, Path]:
    """Files by name that are no weights; hidden ones are left out."""
    paths = sorted(path for place in _PLACES for path in folder.glob(place))
    return {
        path.relative_to(folder).as_posix(): path
        for path in paths
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS)
    }


def copy_files(files: Mapping[str, Path], folder: Path, *, leave_out: Collection[str] = ()) -> None:
    """Copy ``files``, by the names they get, into ``folder``."""
    for name, path in files.items():
        if name not in leave_out:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)


def _write_tokenizer_config(folder: Path, *, eos_token: str) -> None:
    """Say what the special tokens of a bare tokenizer.json are, so that AutoTokenizer loads it."""
    ids = _token_ids(folder)
    names = {role: next((name for name in names if name in ids), "") for role, names in _CUSTOMARY.items()}
    names["eos_token"] = eos_token if eos_token in ids else ""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {role: name for role, name in names.items() if name}
    (folder / _TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _token_ids(folder: Path) -> dict[str, int]:
    """Ids of the tokens in tokenizer.json, by what they spell."""
    document = read_json(folder / _TOKENIZER, what="a tokenizer")
    vocabulary = document.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        vocabulary = {pair[0]: number for number, pair in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in document.get("added_tokens", ())}}


def source_files(folder: RunFolder) -> Path | None:
    """The folder with the files of a run's model: its copy in the run, or ``model.hf`` itself; None: it has none.

    Raises:
        InputError: the model came from a folder, and neither is there.
    """
    hf = load_saved(folder.config).model.hf
    if not hf:
        return folder.model_files if folder.model_files.is_dir() else None
    for place in (folder.model_files, Path(hf)):
        if (place / CONFIG).is_file():
            return place
    raise InputError(
        f"{shown(hf)}, from which the model came (model.hf), is gone, and so is its copy {shown(folder.model_files)}; "
        "put one of them back: the exported folder needs its configuration and tokenizer"
    )


def trained_config(source: Path, *, dtype: str, max_length: int) -> dict[str, Any]:
    """The ``config.json`` of ``source`` with what training changed: the type of the weights, and longer positions."""
    config = dict(read_json(source / CONFIG, what="a model's configuration", finite=False))
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
    config |= dict.fromkeys(names, dtype)
    positions = config.get("max_position_embeddings")
    return config if positions is None else config | {"max_position_embeddings": max(positions, max_length)}


def special_ids(files: Path | None) -> dict[str, int]:
    """The entries of ``config.json`` that a tokenizer decides: ids of the tokens that begin, end and fill up text."""
    if files is None or not (files / _TOKENIZER).is_file():
        return {}
    ids, config = _token_ids(files), read_json(files / _TOKENIZER_CONFIG, what="a tokenizer's configuration")
    names = {role: _content(config.get(role)) for role in ("bos_token", "eos_token", "pad_token")}
    return {f"{role}_id": ids[name] for role, name in names.items() if name in ids}


def mask_token_id(files: Path) -> int | None:
    """The id of the token that hides others, as the tokenizer in ``files`` says; None if it says none."""
    if not all((files / name).is_file() for name in (_TOKENIZER, _TOKENIZER_CONFIG)):
        return None
    config = read_json(files / _TOKENIZER_CONFIG, what="a tokenizer's configuration")
    return _token_ids(files).get(_content(config.get("mask_token")))


def _content(token: str | Mapping[str, Any] | None) -> str:
    return str(token.get("content", "") if isinstance(token, Mapping) else token or "")
