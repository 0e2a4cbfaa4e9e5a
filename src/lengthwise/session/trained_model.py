"""Which model a configuration means: its sizes, who computes it, and whether it holds the corpus. Needs no torch."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lengthwise.config.model_config import NOT_OF_A_FOLDER
from lengthwise.config.run_config import Config
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError, missing_package
from lengthwise.core.pipeline_config import WEIGHTS_OF, WeightPlacement
from lengthwise.core.read_file import brief
from lengthwise.core.specs import ModelSpec, model_preset
from lengthwise.data.corpus import Corpus
from lengthwise.models.hf_config import UnsupportedModelError, read_config, read_spec
from lengthwise.models.stock_model import StockModel, objective_of_class, read_stock_model
from lengthwise.models.weight_files import refuse_adapter, weight_files
from lengthwise.session.method_choice import asked_methods
from lengthwise.session.model_files import mask_token_id
from lengthwise.session.planning_args import check_positions
from lengthwise.session.priced_model import read_compared_spec


def objective_of(config: Config) -> str:
    """What the configured model is trained to predict: hidden tokens or the next one."""
    if not config.model.hf:
        return model_preset(config.model.preset).objective
    names = read_config(hf_folder(config)).get("architectures") or ["of a next token"]
    return objective_of_class(names[0])


def hf_folder(config: Config) -> Path:
    """The folder that ``model.hf`` names.

    Raises:
        InputError: there is none, or it holds an adapter, which transformers would put on the model that it loads.
    """
    folder = Path(config.model.hf)
    if not folder.is_dir():
        raise InputError(
            f"model.hf={brief(config.model.hf)} is no folder; download the model into one (hf download NAME "
            "--local-dir DIR) and give that, or train it by its name in Python with lengthwise.prepare or "
            "lengthwise.Trainer"
        )
    refuse_adapter(folder)
    return folder


def _check_vocabulary(config: Config, vocab_size: int) -> None:
    """Raise ``InputError`` if another number of token ids is set than a model of ``model.hf`` embeds."""
    if config.model.vocab_size not in (None, vocab_size):
        raise InputError(f"model.vocab_size={config.model.vocab_size} {NOT_OF_A_FOLDER}")


def resolve_model(config: Config, corpus: Corpus | None, *, only_priced: bool = False) -> ModelSpec:
    """The model's sizes; a preset's vocabulary becomes what the index needs, rounded up to a multiple of 64.

    A preset that is not causal needs one id more than the index has: its last one is the mask token. With
    ``only_priced``, the folder of ``model.hf`` may hold a model of any family, which is planned and not trained.

    Raises:
        InputError: the model embeds fewer token ids than the index has, has fewer positions than its longest sequence
            has tokens, or predicts masked tokens and names no mask token.
    """
    model = config.model
    needed = corpus.vocab_size if corpus is not None and corpus.has_tokens else None
    if model.hf:
        spec = read_compared_spec(hf_folder(config)) if only_priced else read_spec(hf_folder(config))
        _check_vocabulary(config, spec.vocab_size)
    else:
        spec = with_sizes(model_preset(model.preset), model.sizes)
        needed = needed and needed + (not spec.causal)
        wanted = model.vocab_size or (needed and -(-needed // 64) * 64)
        spec = replace(spec, vocab_size=wanted) if wanted else spec
        spec = spec if spec.causal else replace(spec, mask_token_id=spec.vocab_size - 1)
    if corpus is not None:
        check_model_holds(spec, corpus, is_of_folder=bool(model.hf), has_own_mask=not (spec.causal or model.hf))
    return spec


def with_sizes(spec: ModelSpec, sizes: dict[str, int]) -> ModelSpec:
    """The model with other sizes, and a name that says so; heads are as wide as divides the hidden size.

    Raises:
        InputError: heads do not divide the hidden size, or the model has no such size.
    """
    if not sizes:
        return spec
    if "max_positions" in sizes and not spec.max_positions:
        raise InputError(f"model.max_positions={sizes['max_positions']}: the positions of {spec.name} are rotary")
    changes: dict[str, Any] = {**sizes, "name": " ".join([spec.name, *(f"{key}={sizes[key]}" for key in sizes)])}
    if "num_heads" in sizes:
        changes.setdefault("num_kv_heads", sizes["num_heads"])
    if {"num_heads", "hidden_size"} & sizes.keys():
        hidden_size, num_heads = sizes.get("hidden_size", spec.hidden_size), sizes.get("num_heads", spec.num_heads)
        if hidden_size % num_heads:
            raise InputError(
                f"model.hidden_size={hidden_size} is no multiple of model.num_heads={num_heads}; set both, such as "
                f"model.hidden_size={-(-hidden_size // num_heads) * num_heads}"
            )
        changes["head_size"] = hidden_size // num_heads
    return replace(spec, **changes)


def check_model_holds(
    spec: ModelSpec | StockModel, corpus: Corpus, *, is_of_folder: bool, has_own_mask: bool = False
) -> None:
    """Raise ``InputError`` unless the model has a corpus's token ids and positions, and a mask if it needs one.

    ``is_of_folder``: whether it is that of ``model.hf``, whose vocabulary no setting changes.
    """
    needed = corpus.vocab_size + has_own_mask if corpus.has_tokens else 0
    if spec.vocab_size < needed:
        way_out = "index with the model's own tokenizer.json or raise model.vocab_size"
        if is_of_folder:
            way_out = "index with its own tokenizer.json, or give it more with transformers (resize_token_embeddings)"
        mask_note = " (one of them its mask token)" if has_own_mask else ""
        raise InputError(
            f"the index has {needed:,} token ids{mask_note}, model {spec.name} embeds {spec.vocab_size:,}; {way_out}"
        )
    check_positions(spec.name, spec.max_positions, longest=corpus.lengths.max_length)
    if corpus.has_loss_mask and spec.objective != NEXT_TOKEN:
        raise InputError(
            f"the index says which tokens have a loss, and model {spec.name} learns from masked tokens instead of next "
            "ones; index again with --loss all"
        )
    if corpus.lengths.targets is not None and not corpus.lengths.targets.any():
        raise InputError(
            "no token of the corpus has a loss after data.max_length; raise it, or set data.over_length=drop"
        )
    if corpus.has_tokens and not spec.causal and spec.mask_token_id is None:
        raise InputError(
            f"model {spec.name} predicts masked tokens and its config.json does not say which token masks them; "
            'add "mask_token_id", the id of [MASK] in its tokenizer.json'
        )


def trained_model(config: Config, corpus: Corpus, *, needs_weights: bool = True) -> ModelSpec | StockModel:
    """The model that a run trains: one of this library's own, or one that transformers computes.

    ``needs_weights``: whether the folder of one that transformers computes has to have its weights.

    Raises:
        InputError: as :func:`resolve_model`; or transformers does not have the model, or computes it and settings ask
            for what only own models have.
    """
    chosen, hf = config.model.implementation, config.model.hf
    if chosen == "transformers" and not hf:
        raise InputError(
            f"model.implementation=transformers computes the model of a folder, and model.preset="
            f"{config.model.preset} is this library's own; set model.hf, or leave model.implementation out"
        )
    if not hf or chosen == "lengthwise":
        return resolve_model(config, corpus)
    if chosen == "auto":
        try:
            return resolve_model(config, corpus)
        except UnsupportedModelError:
            pass
    folder = hf_folder(config)
    model = read_stock_model(folder, mask_token_id=mask_token_id(folder))
    _check_known(model)
    if needs_weights:
        weight_files(folder)
    _check_settings(config, model)
    _check_vocabulary(config, model.vocab_size)
    check_model_holds(model, corpus, is_of_folder=True)
    return model


def _check_known(model: StockModel) -> None:
    """Raise ``InputError`` unless transformers is installed and has the model's class."""
    if find_spec("transformers") is None:
        raise missing_package(f"training a {model.architecture}", "transformers")
    import transformers

    names = transformers.__all__  # type: ignore[attr-defined]
    if model.architecture not in names:  # no module of a model is imported; dir() of theirs takes a third of a second
        raise InputError(
            f"{model.folder / 'config.json'}: transformers {transformers.__version__} has no class "
            f"{brief(model.architecture)}; install a version that has it, or load the model yourself and train it with "
            "lengthwise.prepare"
        )


def _check_settings(config: Config, model: StockModel) -> None:
    """Raise ``InputError`` if a setting asks for what models that transformers computes cannot do."""
    plan, train = config.plan, config.train
    shared_by = [str(method) for method, weights in WEIGHTS_OF.items() if weights is WeightPlacement.WHOLE]
    refused = {
        f"train.schedule={train.schedule}": (train.schedule != "1f1b", "their pipeline stages run under 1F1B"),
        asked_methods(plan): (
            {*(plan.methods or ()), plan.method} - {"", "dense", *shared_by},
            f"ranks share them by methods on whole weights ({', '.join(shared_by)})",
        ),
        f"plan.shapes={plan.shapes}": (plan.shapes, "their layers are compiled for any number of tokens"),
        f"plan.workers={plan.workers}": (plan.workers, "their costs are corrected from step to step"),
        f"plan.cost={plan.cost}": (plan.cost != "fitted", "their costs are measured before the run"),
    }
    for setting, (is_asked_for, why) in refused.items():
        if is_asked_for:
            raise InputError(
                f"{setting} is not for models that transformers computes, such as this {model.architecture}: {why}; "
                "leave it out, or train a model of this library's own (llama, qwen2, gpt2, bert)"
            )
