"""The model of a configured run, with its first weights."""

from pathlib import Path

import torch

from lengthwise.config.run_config import Config
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.hf_folder import load_weights
from lengthwise.runtime.models.registry import build_model


def build(config: Config, spec: ModelSpec, world: DistContext) -> Transformer:
    """The model with its first weights: from ``model.hf``, or drawn from the seed."""
    model = build_model(spec, dtype=getattr(torch, config.train.dtype), device=world.device, seed=config.seed)
    if config.model.hf:
        load_weights(model, Path(config.model.hf))
    return model
