"""Whose code computes the model of a run: this library's own where it has it, else transformers'."""

import json

import pytest

from lengthwise.config.run_config import check, load
from lengthwise.core.batch import MASKED, NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.core.specs import ModelSpec, model_preset
from lengthwise.data.corpus import open_corpus
from lengthwise.models.stock_model import StockModel
from lengthwise.session.planning import make_sampler
from lengthwise.session.trained_model import resolve_model, trained_model
from tests.index.build import build, write_jsonl

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
MAMBA = {"architectures": ["MambaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
ROBERTA = {**LLAMA, "architectures": ["RobertaForMaskedLM"]}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    return str(build(write_jsonl(folder / "a.jsonl", ["x" * size for size in (10, 20, 30)]), folder / "a").path)


@pytest.fixture
def choose(index, tmp_path):
    """The trained model of a folder with this config.json, and the objective of the run's batches."""

    def run(document: dict | None, files: dict | None = None, **settings):
        folder = tmp_path / "hf"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").touch()
        for name, content in {"config.json": document, **(files or {})}.items():
            (folder / name).write_text(json.dumps(content))
        model = {"hf": str(folder) if document else "", **settings.pop("model", {})}
        config = check({"data": {"index": index}, "model": model, **settings})
        corpus = open_corpus(config.data)
        make_sampler(config, corpus)
        return trained_model(config, corpus)

    return run


def test_own_code_computes_what_it_has_and_transformers_the_rest(choose):
    assert isinstance(choose(LLAMA), ModelSpec)
    for document in (MAMBA, {**LLAMA, "attention_bias": True}, {**LLAMA, "rope_scaling": {"rope_type": "dynamic"}}):
        model = choose(document)
        assert isinstance(model, StockModel) and model.objective == NEXT_TOKEN, document
    assert choose(MAMBA).spec is None and choose({**LLAMA, "attention_bias": True}).spec.hidden_size == 64
    model = choose(LLAMA, model={"implementation": "transformers"})
    assert (model.architecture, model.context_length, model.causal) == ("LlamaForCausalLM", 128, True)
    with pytest.raises(InputError, match=r"model\.implementation=auto, .* train such models as transformers has them"):
        choose(MAMBA, model={"implementation": "lengthwise"})
    with pytest.raises(InputError, match=r"model\.preset=llama-tiny is this library's own; set model\.hf"):
        choose(None, model={"implementation": "transformers"})


@pytest.mark.parametrize("document", [LLAMA, MAMBA])
def test_the_vocabulary_of_a_folder_is_its_own(choose, document):
    assert choose(document, model={"vocab_size": 512}).vocab_size == 512
    with pytest.raises(
        InputError, match=r"model\.vocab_size=300 is for presets; a model of model\.hf is as its config"
    ):
        choose(document, model={"vocab_size": 300})
    with pytest.raises(
        InputError, match=r"the index has 257 token ids, model \w+ embeds 20; index with its own"
    ) as error:
        choose({**document, "vocab_size": 20})
    assert "model.vocab_size" not in str(error.value)


def test_a_mask_token_is_that_of_the_configuration_or_of_the_tokenizer(choose):
    with pytest.raises(InputError, match=r"predicts masked tokens and its config\.json does not say"):
        choose(ROBERTA)
    assert choose({**ROBERTA, "mask_token_id": 7}).mask_token_id == 7
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<mask>", "id": 9}]}
    model = choose(
        ROBERTA, {"tokenizer.json": tokenizer, "tokenizer_config.json": {"mask_token": {"content": "<mask>"}}}
    )
    assert model.mask_token_id == 9 and model.objective == MASKED


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            {**MAMBA, "architectures": ["GptXForCausalLM"]},
            r"has no class 'GptXForCausalLM'; install a version that has",
        ),
        ({**MAMBA, "architectures": []}, r"architectures = \[\] does not say which class of transformers the model is"),
        ({**MAMBA, "vocab_size": 20}, r"the index has 257 token ids, model hf embeds 20"),
    ],
)
def test_what_transformers_cannot_train_is_refused_by_one_sentence(choose, document, words):
    with pytest.raises(InputError, match=words):
        choose(document)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"train": {"schedule": "gpipe"}},
            "train.schedule=gpipe .* their pipeline stages run under 1F1B; leave it out",
        ),
        ({"plan": {"cost": "hybrid"}}, "plan.cost=hybrid .* their costs are measured before the run"),
    ],
)
def test_settings_of_own_models_are_refused(choose, settings, words):
    with pytest.raises(InputError, match=words):
        choose(MAMBA, **settings)


def test_sizes_of_a_preset_are_replaced():
    spec = resolve_model(load(None, ["model.num_layers=3", "model.hidden_size=96", "model.num_heads=6"]), None)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_size) == (3, 96, 6, 6, 16)
    assert spec.name == "llama-tiny num_layers=3 hidden_size=96 num_heads=6"
    spec = resolve_model(load(None, ["model.preset=bert-1024", "model.max_positions=2048", "model.ffn_size=64"]), None)
    assert (spec.max_positions, spec.ffn_size) == (2048, 64)
    assert resolve_model(load(None, []), None) == model_preset("llama-tiny")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.num_heads=7"], "model.hidden_size=[0-9]+ is no multiple of model.num_heads=7; set both"),
        (["model.num_heads=4", "model.num_kv_heads=3"], "4 heads cannot share 3 key/value heads evenly"),
        (["model.max_positions=64"], "model.max_positions=64: the positions of llama-tiny are rotary"),
        (["model.num_layers=99999"], "num_layers must be a whole number from 1 to 16,384"),
    ],
)
def test_sizes_that_a_model_cannot_have_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        resolve_model(load(None, settings), None)
