"""What must be the same on all ranks of `lengthwise train` before they train: settings, versions, data, weights."""

from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.config.run_config import Config
from lengthwise.core.specs import ModelSpec
from lengthwise.plan.outside_policy import policy_digest

if TYPE_CHECKING:
    from torch import nn

    from lengthwise.core.specs import ClusterSpec
    from lengthwise.data.corpus import Corpus, CorpusPart
    from lengthwise.models.stock_model import StockModel

NUM_PROBES, PROBE_TOKENS = 64, 512
"""Places of an index whose tokens are compared, and tokens at each; its digest covers all of them."""


def settings_to_compare(config: Config, *, resume: bool, fall_back: bool) -> dict[str, Any]:
    """The whole configuration but for paths, which may differ between machines, and for what only logs."""
    tree = config.model_dump(mode="json")
    for name in ("name", "output", "run_folder"):
        del tree[name]
    for name in ("log_every", "tensorboard", "wandb", "trackio", "mlflow", "timeline"):
        del tree["train"][name]
    for section, name in (
        ("data", "index"),
        ("data", "validation"),
        ("model", "hf"),
        ("plan", "file"),
        ("plan", "profile"),
    ):
        tree[section][name] = "set" if tree[section][name] else ""
    for part in tree["data"]["mixture"]:
        part["index"] = Path(part["index"]).name
    return {**tree, "resume": resume, "fall_back": fall_back, "numpy": np.__version__}


def run_to_compare(
    config: Config,
    corpus: "Corpus",
    *,
    spec: "ModelSpec | StockModel",
    cluster: "ClusterSpec",
    model: "nn.Module",
    validation: "Corpus | None" = None,
) -> dict[str, Any]:
    """What those settings stand for on this rank: the content of files, the model's first weights, the devices."""
    from lengthwise.runtime.models.base import Transformer
    from lengthwise.runtime.models.checksum import weight_checksums

    first = model.first_weights if isinstance(model, Transformer) else None
    is_own = isinstance(spec, ModelSpec)  # other models have the first rank's profile, which may not be there yet
    files = {"plan.file": config.plan.file, "plan.profile": config.plan.profile if is_own else ""}
    return {
        "data": _corpus(corpus),
        "validation": validation and _corpus(validation),
        "model": {"digest": spec.digest, "weights": first.identity() if first else weight_checksums(model)},
        "files": {name: _file_digest(Path(path)) for name, path in files.items() if path},
        "cluster": asdict(cluster),
        "policy": policy_digest(config.plan.policy),
    }


def _corpus(corpus: "Corpus") -> dict[str, Any]:
    return {"digest": corpus.digest, "parts": {part.name: _content(part) for part in corpus.parts}}


def _content(part: "CorpusPart") -> dict[str, Any]:
    """What an index says of itself, and a digest over tokens at places all over it."""
    view = part.view.lengths
    last = len(view.lengths) - 1
    state = blake2b(digest_size=8)
    for id in sorted({probe * last // (NUM_PROBES - 1) for probe in range(NUM_PROBES)}):
        state.update(part.tokens(id)[:PROBE_TOKENS].astype(np.int64).tobytes())
    return {
        "digest": part.store.digest,
        "num_sequences": len(view.lengths),
        "num_tokens": int(view.num_tokens),
        "some_tokens": state.hexdigest(),
    }


def _file_digest(path: Path) -> str:
    state = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()
