"""Planners of models that transformers computes, and options of ``prepare`` for them; needs no torch."""

from dataclasses import dataclass

from lengthwise.config.prepare_options import PrepareOptions, read_options
from lengthwise.config.run_config import Config
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.cost import CostModel
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import ClusterSpec
from lengthwise.data.corpus import Corpus
from lengthwise.models.stock_model import StockModel
from lengthwise.plan.planner import Planner
from lengthwise.session.planning import make_planner

_CAUSAL = ("ForCausalLM", "LMHeadModel", "LMHead")
"""Ends of names of classes that learn the next token from rows without labels, whatever their loss does with labels."""


@dataclass(frozen=True, kw_only=True)
class StockLayers:
    """What a planner needs to know of a prepared model."""

    num_layers: int
    objective: str
    head_layers: float = 0.0


def stock_options(config: Config, stock: StockModel, *, quiet: bool) -> PrepareOptions:
    """The options of ``prepare`` that the configuration stands for, as far as they are not those of batches."""
    plan = config.plan
    is_causal = stock.architecture.endswith(_CAUSAL)
    max_degree = 1 if plan.method == Method.DENSE else plan.degree or plan.max_degree
    return read_options(
        {
            "seed": config.seed,
            "device": config.train.device,
            "offload_state": config.train.offload_state,
            "timeout_s": config.train.timeout_s,
            "memory_gib": config.cluster.memory_gib,
            "host_memory_gib": config.cluster.host_memory_gib,
            "offload": plan.offload,
            "shard_gradients": plan.shard_gradients,
            "zero_bubble": plan.zero_bubble,
            "slices": plan.slices,
            "policy": plan.policy,
            "max_degree": max_degree,
            "max_stages": plan.max_stages,
            "max_tokens": plan.max_tokens,
            "methods": plan.methods or (None if plan.method in ("", Method.DENSE) else (plan.method,)),
            "recompute": plan.recompute,
            "feed_forward_tile": plan.tile_tokens or None,
            "compile": config.train.compile,
            "profile": plan.profile or None,
            "objective": NEXT_TOKEN if is_causal else None,
            "mask_token_id": stock.mask_token_id,
            "optimizer": config.optim.optimizer_settings,
            "clip_norm": config.optim.clip_norm,
            "verbose": not quiet,
        }
    )


def stock_planner(
    config: Config,
    cost: CostModel,
    layers: StockLayers,
    *,
    options: PrepareOptions,
    cluster: ClusterSpec,
    corpus: Corpus,
    max_stages: int | None = 1,
) -> Planner:
    """The planner of a corpus for a prepared model, by the settings of a configuration."""
    plan = config.plan
    changes = {
        "profile": "",
        "method": "",
        "methods": None,
        "max_stages": max_stages,
        "max_degree": options.max_degree,
        "max_tokens": options.max_tokens,
        "shard_gradients": options.shard_gradients,
        "zero_bubble": options.zero_bubble,
        "slices": options.slices,
        "local_sequences": False,
        "tile_tokens": None if plan.tile_tokens else plan.tile_tokens,  # else the model's modules compute them
    }
    return make_planner(
        config.model_copy(
            update={
                "plan": config.plan.model_copy(update=changes),
                "train": config.train.model_copy(update={"compile": False}),  # of one shape
            }
        ),
        cost,
        spec=layers,
        cluster=cluster,
        corpus=corpus,
        methods=options.sharing_methods,
    )
