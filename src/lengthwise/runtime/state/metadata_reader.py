"""Read a checkpoint's ``.metadata`` without running anything that it says.

torch.distributed.checkpoint pickles it, and plain unpickling calls whatever a file names. Here a file may name the
classes that torch's writer puts there and nothing else, every entry must be a tensor (torch would unpickle any other
kind once more), and every place must lie inside a file that ``state.json`` lists.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

METADATA_FILE = ".metadata"
_METADATA_CLASSES = (
    "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _METADATA_CLASSES},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    **{(m, f"{kind}PosixPath"): PurePosixPath for m in ("pathlib", "pathlib._local") for kind in ("", "Pure")},
    **{(m, f"{kind}WindowsPath"): PureWindowsPath for m in ("pathlib", "pathlib._local") for kind in ("", "Pure")},
}


class ForeignMetadataError(Exception):
    """The ``.metadata`` of a checkpoint holds what torch's writer would not have written; nothing of it was run."""


class _Unpickler(pickle.Unpickler):
    """Builds the types that metadata consist of."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, if metadata may hold it."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        raise ForeignMetadataError(f"it names {module}.{name}, which metadata of tensors do not")


def _layout(name: str) -> torch.layout:
    if name != str(torch.strided):
        raise ForeignMetadataError(f"it holds a tensor of layout {name!r}, not {torch.strided}")
    return torch.strided


def read_metadata(checkpoint: Path, files: Mapping[str, Any]) -> Metadata:
    """What lies where in a checkpoint; ``files``: what ``state.json`` says of its files.

    Raises:
        ForeignMetadataError: it holds anything but tensors in those files.
    """
    with (checkpoint / METADATA_FILE).open("rb") as stream:
        try:
            loaded = _Unpickler(stream).load()
        except ForeignMetadataError:
            raise
        except Exception as error:  # a pickle can fail in any way
            raise ForeignMetadataError(f"it is no pickle of metadata ({type(error).__name__}: {error})") from None
    if not isinstance(loaded, Metadata):
        raise ForeignMetadataError(f"it holds a {type(loaded).__name__}, not a Metadata")
    try:
        _check_tensors(loaded)
        _check_places(loaded, files)
    except (AttributeError, TypeError) as error:  # a field is missing or of another type
        raise ForeignMetadataError(f"it is incomplete ({error})") from None
    return loaded


def _check_tensors(loaded: Metadata) -> None:
    for name, entry in loaded.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ForeignMetadataError(f"{name!r} is a {type(entry).__name__}, not a tensor")
        if not isinstance(entry.size, torch.Size) or not isinstance(entry.properties.dtype, torch.dtype):
            raise ForeignMetadataError(f"{name!r} has no size or no dtype")


def _check_places(loaded: Metadata, files: Mapping[str, Any]) -> None:
    for index, place in loaded.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, filesystem._StorageInfo):
            raise ForeignMetadataError(f"{index!r} has no place in a file")
        if place.relative_path not in files or place.transform_descriptors:
            raise ForeignMetadataError(f"{index.fqn!r} lies in {place.relative_path!r}, which state.json does not list")
        if (
            place.offset < 0
            or place.length < 0
            or place.offset + place.length > files[place.relative_path]["num_bytes"]
        ):
            raise ForeignMetadataError(f"{index.fqn!r} lies beyond the end of {place.relative_path}")


class Reader(dcp.FileSystemReader):
    """torch's reader of checkpoints, which unpickles nothing but what :func:`read_metadata` allows.

    Raises:
        ForeignMetadataError: as :func:`read_metadata`.
    """

    def __init__(self, checkpoint: Path, files: Mapping[str, Any]) -> None:
        super().__init__(checkpoint)
        self.metadata = read_metadata(checkpoint, files)
        if getattr(self.metadata, "storage_meta", None) is None:
            self.metadata.storage_meta = StorageMeta()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was read when this was made, so that nobody can change the file in between."""
        assert self.metadata.storage_meta is not None
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata
