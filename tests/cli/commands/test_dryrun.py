"""`lengthwise dryrun`: one document, one page and one table of the same step."""

import json

import numpy as np
import pytest

from lengthwise.cli.tables.dryrun_table import print_dry_run

GIVEN = (
    "model.preset=llama-tiny", "cluster.name=1x2xH100-80GB", "plan.policy=static", "data.tokens_per_step=600",
    "train.dtype=bfloat16",
)  # fmt: skip


@pytest.fixture
def index(cli, tmp_path):
    np.save(tmp_path / "lengths.npy", np.arange(50, 150))
    assert cli("index", tmp_path / "lengths.npy", "--out", tmp_path / "index")[0] == 0
    return f"data.index={tmp_path / 'index'}"


def test_a_rank_is_run_and_shown(cli, index, tmp_path, capsys):
    page = tmp_path / "page.html"
    code, out, err = cli("dryrun", index, *GIVEN, "--rank", 1, "--html", page, "--json")
    assert code == 0, err
    document = json.loads(out)
    (row,) = document["ranks"]
    assert row["rank"] == 1 and document["differences"] == []
    assert sum(wait["count"] for wait in row["synchronisations"]) == 1
    assert all(text in page.read_text() for text in ("Rank 1", "_varlen_attn", "all_gather", "global_norm"))
    print_dry_run(document)
    shown = capsys.readouterr().out
    assert "rank 1 (run in" in shown and "the host waits 1 times: runtime/state/sharded.py" in shown
    print_dry_run(document | {"differences": ["rank 1: message 0 is nothing"]})
    assert "not as planned: rank 1: message 0 is nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--rank", "2"], "rank 2 is none of the plan's 2 ranks; name one up to 1"),
        (["cluster.name=1x2xH10-80GB"], "did you mean"),
        (["--plan", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_run_is_refused(cli, index, changes, message):
    code, _, err = cli("dryrun", index, *GIVEN, *changes)
    assert code == 2 and message in err


@pytest.mark.deep
def test_a_model_that_transformers_computes_is_planned_and_run(cli, index, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    document = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(document))
    model = (f"model.hf={tmp_path}", "model.implementation=transformers")
    code, out, err = cli("dryrun", index, *GIVEN, *model, "--rank", 0, "--weights", "by-layer", "--json")
    assert code == 0, err
    assert json.loads(out)["weights"] == "by-layer" and json.loads(out)["differences"] == []


@pytest.mark.deep
def test_an_encoder_with_a_decoder_is_run_sequence_by_sequence(cli, index, tmp_path, caplog):
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "dropout_rate": 0.0}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "vocab_size": 512}
    document = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", **sizes, **ids}
    (tmp_path / "config.json").write_text(json.dumps(document))
    asked = ("dryrun", index, *GIVEN, f"model.hf={tmp_path}", "--rank", 0, "--json")
    code, out, err = cli(*asked)
    assert code == 0, err
    assert json.loads(out)["differences"] == [] and "layers=" not in caplog.text + err
    assert "sequence by sequence" in caplog.text + err
    code, _, err = cli(*asked[:-1], "plan.degree=2")
    assert code == 2 and "plan.degree=2: T5ForConditionalGeneration is computed sequence by sequence" in err


@pytest.mark.deep
def test_nothing_of_a_model_that_packs_would_change_stays_beside_the_one_that_is_run(cli, index, tmp_path, caplog):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    positions = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 512}
    document = {"architectures": ["DebertaV2ForMaskedLM"], "model_type": "deberta-v2", "vocab_size": 512}
    document |= sizes | positions | {"mask_token_id": 4, "pad_token_id": 0, "attention_probs_dropout_prob": 0.0}
    (tmp_path / "config.json").write_text(json.dumps({**document, "hidden_dropout_prob": 0.0}))
    code, out, err = cli("dryrun", index, *GIVEN, f"model.hf={tmp_path}", "--rank", 0, "--json")
    assert code == 0 and "sequence by sequence" in caplog.text + err, err
    (row,) = json.loads(out)["ranks"]
    for kind, predicted in row["predicted"]["peak_bytes"].items():
        assert row["peak_bytes"][kind] == pytest.approx(predicted, rel=0.05), kind


@pytest.mark.deep
def test_a_model_of_images_is_refused(cli, index, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["ViTForImageClassification"], "model_type": "vit"}')
    code, _, err = cli("dryrun", index, *GIVEN, f"model.hf={tmp_path}")
    assert code == 2 and "ViTForImageClassification takes pixel_values, which a corpus of tokens does not have" in err
