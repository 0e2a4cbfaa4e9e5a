"""Which files of a Hugging Face folder hold its weights."""

from pathlib import Path

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief, read_json

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""By which transformers knows that a folder has an adapter."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if not (folder / INDEX).is_file():
        raise InputError(f"{folder} holds neither {WHOLE} nor {INDEX}; weights in other formats are not read")
    document = read_json(folder / INDEX, what="a safetensors index")
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{folder / INDEX} is not a safetensors index: it has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(f"{folder / INDEX} names {brief(name)}, which is no file beside it")
    return [folder / name for name in sorted(set(weight_map.values()))]


def refuse_adapter(folder: Path) -> None:
    """Raise ``InputError`` if a folder has an adapter, which transformers puts on the model that it loads there."""
    if (folder / ADAPTER_CONFIG).exists():
        raise InputError(
            f"{folder} has an adapter of peft ({ADAPTER_CONFIG}), and whole models are computed here. Merge it "
            "(PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(DIR)) and give that folder, or train "
            "the adapter in Python with lengthwise.prepare or lengthwise.Trainer; for the model alone, give a folder "
            "without it"
        )
