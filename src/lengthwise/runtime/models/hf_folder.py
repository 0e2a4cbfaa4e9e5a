"""Hugging Face folders in and out, without importing transformers: ``config.json`` and safetensors.

Llama, Qwen2 (which is Llama with biases on queries, keys and values), GPT-2 and BERT. K key/value heads, G query heads
of each, H head size.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.core.specs import ModelSpec
from lengthwise.models.hf_config import write_config
from lengthwise.models.hf_names import naming_of
from lengthwise.models.weight_files import INDEX, WHOLE, weight_files
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.checksum import checksum
from lengthwise.runtime.models.registry import empty_model

_FUSED = ("qkv", "qkv_bias")


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of this library's weights for ``spec``, in the model's order."""
    return {name: tuple(weight.shape) for name, weight in empty_model(spec).named_parameters()}


def split_weight(spec: ModelSpec, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Convert this library's weight ``name`` to Hugging Face's tensors."""
    naming, kind, parts = naming_of(spec), name.rpartition(".")[2], [weight]
    names = naming.of(name)
    if kind in _FUSED:
        groups = weight.unflatten(0, (spec.num_kv_heads, -1, spec.head_size))  # [K, G + 2, H, ...]
        parts = [part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])]
        parts = parts if len(names) == 3 else [torch.cat(parts)]
    return {theirs: (part.T if kind in naming.transposed else part).contiguous() for theirs, part in zip(names, parts)}


def fuse_weight(spec: ModelSpec, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Convert Hugging Face's tensors to this library's weight ``name``; the inverse of :func:`split_weight`."""
    naming, kind = naming_of(spec), name.rpartition(".")[2]
    parts = [tensors[theirs].T if kind in naming.transposed else tensors[theirs] for theirs in naming.of(name)]
    if kind not in _FUSED:
        return parts[0]
    if len(parts) == 1:
        keys = spec.num_kv_heads * spec.head_size
        parts = list(parts[0].split([spec.qkv_size - 2 * keys, keys, keys]))
    return torch.cat([p.unflatten(0, (spec.num_kv_heads, -1, spec.head_size)) for p in parts], dim=1).flatten(0, 2)


def to_hf(spec: ModelSpec, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict to Hugging Face's tensors. Tied embeddings appear once, as in Hugging Face's files."""
    return {k: v for name, weight in state_dict.items() for k, v in split_weight(spec, name, weight).items()}


def check_tensors(spec: ModelSpec, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise ``InputError`` unless ``found`` has every Hugging Face tensor of ``spec`` in its shape and no other."""
    expected, naming = hf_shapes(spec), naming_of(spec)
    surplus = {name for name in found if naming.is_passed_over(name, is_tied=spec.tied_embeddings)}
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected and name not in surplus]
    problems += [
        f"{name} has shape {list(found[name])}, the model needs {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise InputError(f"{where} do not fit model {spec.name}: {'; '.join(problems[:8])}{more}")


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of Hugging Face's tensors for ``spec``."""
    shapes = {}
    for name, shape in weight_shapes(spec).items():
        parts = split_weight(spec, name, torch.empty(shape, device="meta"))
        shapes.update({theirs: tuple(part.shape) for theirs, part in parts.items()})
    return shapes


class HfWeights:
    """The weights of a Hugging Face folder: ``model.safetensors`` or the shards of its index, mapped and not copied.

    Raises:
        InputError: no safetensors there, a file is missing, or names or shapes do not fit; all are listed.
    """

    def __init__(self, spec: ModelSpec, folder: str | Path) -> None:
        from safetensors import SafetensorError, safe_open

        folder, self._spec, self._naming = Path(folder), spec, naming_of(spec)
        self._tensors: dict[str, tuple[Any, str]] = {}
        """By present name: the file, and the name in it."""
        for file in weight_files(folder):
            try:
                handle = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InputError(f"{file} cannot be read as safetensors: {error}") from None
            self._tensors.update({self._naming.today(name): (handle, name) for name in handle.keys()})  # noqa: SIM118
        shapes = {name: tuple(handle.get_slice(stored).get_shape()) for name, (handle, stored) in self._tensors.items()}
        check_tensors(spec, shapes, f"the weights in {folder}")

    def value(self, name: str) -> Tensor:
        """This library's weight ``name``, in the dtype of the files."""
        stored = {theirs: self._tensors[theirs] for theirs in self._naming.of(name)}
        parts = {theirs: handle.get_tensor(name_there) for theirs, (handle, name_there) in stored.items()}
        return fuse_weight(self._spec, name, parts)

    def identity(self) -> dict[str, str]:
        """A checksum of every weight. Reads every byte once."""
        return {name: checksum(self.value(name)) for name in weight_shapes(self._spec)}


def load_weights(model: Transformer, folder: str | Path) -> None:
    """Overwrite the model's weights with those of a Hugging Face folder, one weight in memory at a time.

    Casts to the model's dtype.

    Raises:
        InputError: as :class:`HfWeights`.
    """
    weights = HfWeights(model.spec, folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights.value(name))


def save_pretrained(
    model: Transformer,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write ``config.json`` and safetensors that ``from_pretrained`` of transformers loads.

    The class is ``AutoModelForCausalLM``; for a BERT, ``BertForMaskedLM``.

    The folder appears whole or not at all: it is written under another name beside its place, then renamed.

    Args:
        model: what to save.
        folder: must not exist, or be empty.
        dtype: of the saved weights; the model's own by default.
        config: further entries of ``config.json`` that :class:`ModelSpec` does not hold, such as
            ``max_position_embeddings`` or ``eos_token_id``.
        max_shard_bytes: weights beyond it go to further files, with an index.

    Raises:
        InputError: the folder is not empty, or transformers has no such model.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder; choose another, or remove it")
    dtype = dtype or next(model.parameters()).dtype
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        write_config(model.spec, temporary / "config.json", dtype=str(dtype).removeprefix("torch."), extra=config or {})
        _write_weights(model, temporary, dtype, max_shard_bytes)
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_weights(model: Transformer, folder: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    from safetensors.torch import save_file

    shards = list(_shards(model.spec, dtype.itemsize, max_shard_bytes))
    weights = dict(model.named_parameters())
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = WHOLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = to_hf(model.spec, {name: weights[name].detach().to("cpu", dtype) for name in names})
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # the package makes it readable to its owner alone
        weight_map.update(dict.fromkeys(tensors, file))
    if len(shards) > 1:
        total = {"total_size": model.spec.num_params * dtype.itemsize}
        (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": weight_map}, indent=2) + "\n")


def _shards(spec: ModelSpec, itemsize: int, max_shard_bytes: int) -> Iterator[list[str]]:
    """Our weights in order, cut where the next one would make a file too large."""
    names: list[str] = []
    num_bytes = 0
    for name, shape in weight_shapes(spec).items():
        size = itemsize * torch.Size(shape).numel()
        if names and num_bytes + size > max_shard_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += size
    yield names
