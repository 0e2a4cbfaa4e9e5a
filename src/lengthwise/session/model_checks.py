"""Models that cannot be prepared as they are: each is refused by one sentence with the way out."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.batch import EVERY_TOKEN
from lengthwise.core.errors import InputError, LengthwiseError, Setting
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.compile.graphs import check_compiler
from lengthwise.runtime.loop.fsdp2 import fsdp_modules
from lengthwise.runtime.wrap.compiled_modules import is_compiled
from lengthwise.runtime.wrap.forward_patch import PreparedForward, check_not_scripted
from lengthwise.runtime.wrap.gradient_changes import has_hook_after_accumulation
from lengthwise.runtime.wrap.user_functions import label_advice, line_of, raised_by
from lengthwise.session.adapter_checks import check_adapters
from lengthwise.session.datasets import RunSequences
from lengthwise.session.id_ranges import check_embedded
from lengthwise.session.overlapping_weights import check_no_weights_overlap

_log = logging.getLogger("lengthwise")

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
_LOOKS = ("pixel_values", "input_values", "input_features")
"""Names of inputs of models that look at pictures or listen."""


def check_model(
    model: Any, *, makes_inputs: bool = False, may_be_compiled: bool = False, packing: str = "auto"
) -> None:
    """Raise ``InputError`` if a model is no module, is wrapped, compiled, not there yet, or prepared already."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the first argument is the model, an nn.Module; {name} is none"
            + (": load it with from_pretrained" if isinstance(model, str) else "")
        )
    _check_not_prepared(model)
    _check_not_wrapped(model, may_be_compiled=may_be_compiled)
    lazy = next((key for key, value in _tensors(model) if is_lazy(value)), None)
    if lazy is not None:
        raise InputError(
            f"{lazy} of {name} has no shape yet, as of a lazy module before its first call; call the model once with a "
            "sequence, the same on every rank after torch.manual_seed, before lengthwise.prepare"
        )
    meta = next((key for key, value in _tensors(model) if value.is_meta), None)
    if meta is not None:
        raise InputError(
            f"{meta} of {name} is on the meta device, so it has no values; load it into host memory with "
            "from_pretrained(folder) (weights='by-layer' brings each rank's share alone to its device), or make it "
            "with model.to_empty(device=...) and initialise it"
        )
    check_no_weights_overlap(model)
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(places) > 1:
        raise InputError(
            f"{name} lies on {len(places)} devices ({', '.join(sorted(map(str, places)))}), and each rank computes the "
            "whole model on its own: load it without device_map"
        )
    check_adapters(model, packing=packing)
    hooked = next((key for key, value in model.named_parameters() if has_hook_after_accumulation(value)), None)
    if hooked is not None:
        raise InputError(
            f"{hooked} of {name} has a hook that runs after its gradient was accumulated, and here that is once for "
            "each micro-batch, on a part of the step's gradient; remove it (register_post_accumulate_grad_hook)"
        )
    config = getattr(model, "config", None)
    looks_at = getattr(model, "main_input_name", "input_ids") if config is not None else "input_ids"
    if looks_at in _LOOKS and not makes_inputs:
        raise InputError(
            f"{name} takes {looks_at}, and items are rows of token ids; say what a micro-batch of it is: "
            "slot_tokens=..., inputs=lambda micro_batch: {...} and loss="
        )


def check_options(model: nn.Module, options: PrepareOptions, device: torch.device) -> None:
    """Raise ``InputError`` if a model cannot be compiled on ``device`` as options say."""
    if not options.compile:
        return
    check_compiler(device, options.compile_backend)
    name = type(model).__name__
    if options.feed_forward_tile is not None:
        raise InputError(
            f"compile=True with feed_forward_tile={options.feed_forward_tile}: compiled layers compute all tokens at "
            "once; leave one of the two out"
        )
    if fsdp_modules(model):
        raise InputError(
            f"compile=True: FSDP2 gathers the weights of {name} by hooks inside of its layers, which compiled code "
            "would leave out; do not call fully_shard (weights='by-layer' shards them), or leave compile out"
        )


def check_by_sequence(model: nn.Module, options: PrepareOptions) -> None:
    """Raise ``InputError`` if options ask for what the stock forward of a model does not do."""
    refused = {
        f"feed_forward_tile={options.feed_forward_tile}": options.feed_forward_tile is not None,
        "compile=True": options.compile,
    }
    for option, is_asked_for in refused.items():
        if is_asked_for:
            raise InputError(
                f"{option}: {type(model).__name__} is computed sequence by sequence, by its stock forward; leave it out"
            )


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _check_not_prepared(model: nn.Module) -> None:
    for key, module in model.named_modules():
        if isinstance(vars(module).get("forward"), PreparedForward):
            part = f"its part {key}" if key else "it"
            raise InputError(
                f"{type(model).__name__} cannot be prepared: {part} was prepared before and belongs to another run; "
                "call run.close() first, which gives it back with today's weights"
            )
    for key, parameter in model.named_parameters():
        if has_hook_after_accumulation(parameter, of_library=True):
            raise InputError(
                f"{type(model).__name__} cannot be prepared: another run trains its {key}, and weights of two runs "
                "would come apart; call run.close() of that run first, or train both models as parts of one module"
            )


def _check_not_wrapped(model: nn.Module, *, may_be_compiled: bool) -> None:
    name = type(model).__name__
    if any(kind.__name__ in _WRAPPERS for kind in type(model).__mro__):
        raise InputError(f"{name} sums gradients or shards weights by itself, which the run does: give {name}.module")
    if is_compiled(model):
        raise InputError(
            f"{name} is compiled as a whole, and attention in compiled code cannot be shared by ranks: give "
            "model._orig_mod, and say compile=True, which compiles its layers around their attention"
        )
    check_not_scripted(model)
    for key, module in [] if may_be_compiled else model.named_modules():
        if is_compiled(module) or getattr(module, "_compiled_call_impl", None) is not None:
            raise InputError(
                f"{f'{key} of {name}' if key else name} is compiled, and attention in compiled code cannot be shared "
                "by ranks: leave compile() out, or say compile=True, which compiles its layers around their attention"
            )


@contextmanager
def forward_errors_named(model: nn.Module, options: PrepareOptions, *, call: str) -> Iterator[None]:
    """What the model's own code raises becomes an ``InputError`` that says how it was called, and what can be changed.

    ``call``: what it is called with, and in which dtype, in words.
    """
    try:
        yield
    except LengthwiseError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, NotImplementedError, RuntimeError) as error:
        if is_out_of_memory(error) or isinstance(error, torch.distributed.DistError):
            raise
        reason = " ".join(str(error).split())[:200]
        function, name = raised_by(error), type(model).__name__
        what = f"{function} of {name}" if function else f"the forward of {name}"
        makes_inputs = options.inputs is not None
        way_out = label_advice(error, ignore_index=options.ignore_index, makes_inputs=makes_inputs)
        way_out = way_out or (f"change what {function} computes" if function else _way_out(model, error, options))
        raise InputError(
            f"{what} fails with {call}{line_of(error)} ({type(error).__name__}: {reason}); {way_out}"
        ) from error


_OF_TORCH = ("not implemented", "not supported", "derivative", "dtype", "scalar type", "backend")
"""Words of errors that torch raises for a device or a dtype, however it is called."""
_SAYS = {
    "inputs": "how it is called with inputs=lambda micro_batch: {...}",
    "loss": "how its loss is made with loss=lambda output, micro_batch: ...",
}


_GROUPED = "mat_a"
"""What torch calls the tokens of its grouped product of experts, which has no float64."""


def _way_out(model: nn.Module, error: Exception, options: PrepareOptions) -> str:
    """What the user can do, and has not done."""
    chooser = "set_experts_implementation"
    of_experts = next((name for name, module in model.named_modules() if hasattr(module, chooser)), None)
    if _GROUPED in str(error) and of_experts is not None:
        path = f"model.{of_experts}" if of_experts else "model"
        return f'call {path}.{chooser}("eager") before, or give the model in another dtype, such as model.float()'
    is_raised = (extract_tb(error.__traceback__)[-1].line or "").startswith("raise ")
    if not is_raised and isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OF_TORCH):
        return "change that line, set another device=, or give the model in another dtype, such as model.float()"
    missing = [words for name, words in _SAYS.items() if getattr(options, name) is None]
    return f"say {', and '.join(missing)}" if missing else "change that line, or what inputs= and loss= make"


def check_padding(options: PrepareOptions, objective: str, sequences: RunSequences) -> None:
    """Raise ``InputError`` if the policy pads sequences, and the model has a loss at every slot, of padding too."""
    if options.policy == "padded" and objective == EVERY_TOKEN and sequences.labels is None:
        raise InputError(
            f"policy='padded' pads the sequences of a micro-batch to one length, and with objective='{EVERY_TOKEN}' "
            "and no labels each slot has a loss, so padding would be learned from as well; plan without padding: "
            "policy='static' has micro-batches of one size too, 'packed' and 'auto' lay sequences end to end; or give "
            f"items labels, {options.ignore_index} for tokens without a loss"
        )


def check_takes(model: nn.Module, sequences: RunSequences) -> None:
    """Raise ``InputError`` if a model of transformers has no row for a token or a position of the corpus."""
    config, name = getattr(model, "config", None), type(model).__name__
    check_embedded(model, sequences.largest_token)
    limit, longest = getattr(config, "max_position_embeddings", None), sequences.computed_lengths.max_length
    if not isinstance(limit, int) or limit < 1 or longest <= limit:  # XLNet, which has no limit, says -1
        return
    problem = f"the longest sequence has {longest:,} tokens, {name} was made for {limit:,} positions"
    if any(getattr(config, rotary, None) is not None for rotary in ("rope_parameters", "rope_theta", "rope_scaling")):
        _log.warning("%s; rotary positions beyond are computed all the same", problem)
        return
    if sequences.units is not None:
        raise InputError(f"{problem}; cut the members of units in the dataset, which max_length does not")
    ways = f"{Setting.MAX_LENGTH}={limit} and {Setting.OVER_LENGTH} to what shall happen (split, truncate, drop)"
    raise InputError(f"{problem}; set {ways}")
