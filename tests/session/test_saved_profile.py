"""Profiles that ``prepare`` saves of models whose forwards write to their config, or leave layers out at random."""

import logging

import numpy as np
import pytest
import torch
import transformers

import lengthwise as lw

pytestmark = pytest.mark.usefixtures("unchecked")

OPTIONS = {"sequences_per_step": 8, "steps": 1, "verbose": False, "policy": "static"}
SIZES = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}


def rows(longest):
    return [np.random.default_rng(n).integers(1, 50, n) for n in range(longest - 7, longest + 1)]


def classifier():
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, intermediate_size=32, num_hidden_layers=2, num_labels=3)
    )


def test_a_profile_serves_the_next_run_though_forwards_write_to_the_config(tmp_path, caplog):
    items = [{"input_ids": row, "labels": int(row[0]) % 3} for row in rows(24)]
    for _ in range(2):
        model = classifier()
        assert model.config.problem_type is None, "its forward writes which it is"
        lw.prepare(model, items, profile=tmp_path / "costs.json", **OPTIONS).close()
    assert not [record for record in caplog.records if "measured anew" in record.getMessage()]


@pytest.mark.parametrize("num_models", [1, pytest.param(3, marks=pytest.mark.deep)])
def test_a_model_that_drops_layers_at_random_is_measured(num_models, tmp_path, caplog):
    for seed in range(num_models):
        torch.manual_seed(seed)
        config = transformers.OPTConfig(**SIZES, ffn_dim=32, num_hidden_layers=6, word_embed_proj_dim=16, layerdrop=0.3)
        with caplog.at_level(logging.ERROR):
            lw.prepare(
                transformers.OPTForCausalLM(config), rows(24), profile=tmp_path / f"{seed}.json", **OPTIONS
            ).close()


def test_a_model_whose_measured_layers_are_all_dropped_is_measured_with_other_random_numbers(tmp_path):
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_position_embeddings=64, encoder_layers=2, decoder_layers=2, encoder_layerdrop=0.5,
        decoder_layerdrop=0.5,
    )  # fmt: skip
    items = [{"input_ids": row, "labels": row} for row in rows(24)]
    model = transformers.BartForConditionalGeneration(config)
    lw.prepare(model, items, profile=tmp_path / "costs.json", **OPTIONS).close()
