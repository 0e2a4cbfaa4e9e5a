"""The model whose loss is a metric: of a Hugging Face folder, or of one of our runs as its latest checkpoint has it."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.specs import ModelSpec
from lengthwise.models.hf_config import read_spec
from lengthwise.models.weight_files import refuse_adapter
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.hf_folder import load_weights as load_hf_weights
from lengthwise.runtime.models.hf_folder import weight_files
from lengthwise.runtime.models.registry import empty_model
from lengthwise.runtime.state.checkpoint import latest, load_weights
from lengthwise.runtime.state.checkpoint_files import STATE_FILE

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class ReferenceModel:
    """A reference model and the files that hold its weights."""

    folder: Path
    """Of Hugging Face, or a run's."""
    checkpoint: Path | None
    """Of a run."""
    spec: ModelSpec

    def digest(self) -> str:
        """Sixteen hex digits over sizes and weights. Reads the weights, but of a checkpoint the digests it lists."""
        files = [self.checkpoint / STATE_FILE] if self.checkpoint else weight_files(self.folder)
        state = blake2b(self.spec.digest.encode(), digest_size=8)
        for path in files:
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    state.update(block)
        return state.hexdigest()

    def load(self, dtype: torch.dtype, device: torch.device) -> Transformer:
        """The model, whose weights need no gradients.

        Raises:
            InputError: weights are missing, damaged, or not those of the model.
        """
        model = empty_model(self.spec, dtype=dtype, device=device).requires_grad_(False)
        if self.checkpoint is None:
            load_hf_weights(model, self.folder)
            return model
        weights = load_weights(self.checkpoint, self.spec)
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        return model


def find_reference(folder: Path) -> ReferenceModel:
    """The model in ``folder``.

    Raises:
        InputError: there is none, or it cannot be computed exactly here.
    """
    run = RunFolder(folder)
    if run.config.is_file():
        if architecture := run.read_json("model.json").get("architecture"):
            raise InputError(
                f"{folder} trained a {architecture} of transformers, and losses are computed by this library's own "
                f"models; give a function of your own (MODULE:FUNCTION) that calls it"
            )
        return ReferenceModel(folder=folder, checkpoint=latest(run.checkpoints), spec=run.read_spec())
    refuse_adapter(folder)
    if (folder / "config.json").is_file():
        return ReferenceModel(folder=folder, checkpoint=None, spec=read_spec(folder))
    raise InputError(
        f"no model in {folder}: it has neither the config.json of a Hugging Face folder nor the config.yaml of a run"
    )
