"""The model of a configured run, with its first weights."""

import torch
from torch import nn

from lengthwise.config.run_config import Config
from lengthwise.core.errors import InputError, first_line
from lengthwise.core.specs import ModelSpec
from lengthwise.models.stock_model import StockModel
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.first_weights import DrawnWeights, model_to_fill
from lengthwise.runtime.models.hf_folder import HfWeights


def build(config: Config, spec: ModelSpec, world: DistContext) -> Transformer:
    """The model whose ranks take shares of its first weights: those of ``model.hf``, or drawn from the seed."""
    weights = HfWeights(spec, config.model.hf) if config.model.hf else DrawnWeights(spec, seed=config.seed)
    return model_to_fill(spec, weights, dtype=getattr(torch, config.train.dtype), device=world.device)


def load_stock(config: Config, stock: StockModel) -> nn.Module:
    """The model of ``model.hf`` as its class in transformers loads it, in training mode.

    Raises:
        InputError: its weights are missing or damaged.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, report = getattr(transformers, stock.architecture).from_pretrained(
            stock.folder,
            dtype=getattr(torch, config.train.dtype),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise InputError(
            f"{stock.architecture} of transformers {transformers.__version__} does not load {stock.folder} "
            f"({first_line(error)}); give a folder as save_pretrained writes it"
        ) from error
    if lacking := sorted({*report["missing_keys"], *(str(name) for name in report["mismatched_keys"])}):
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise InputError(f"the weights in {stock.folder} lack {lacking[0]}{more}, which {stock.architecture} has")
    loaded: nn.Module = model
    return loaded.train()
