"""Models of transformers make their loss without the matrix of logits, on packs and beside a loss of the user's."""

import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.runtime.wrap.deferred_logits import DeferredLogits

pytestmark = pytest.mark.usefixtures("unchecked")

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.0,
}  # fmt: skip
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}
MODELS = {
    "tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "soft-capped": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, sliding_window=8)),
    "scaled": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES)),
    "masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **BERT)),
}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] * (name in ("tied", "scaled"))) for name in MODELS]
)
def test_no_matrix_of_logits_is_made_for_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    rows = [torch.randint(5, 61, (length,)).tolist() for length in (9, 4, 17, 6)]
    if name == "masked":
        rows = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]
    objective = {"objective": "masked"} if name == "masked" else {}
    run = lw.prepare(model, rows, policy="dcp-intra", lr=1e-3, sequences_per_step=4, steps=1, check=False, **objective)
    for step in run.steps():
        for micro_batch in step:
            output = model(**micro_batch.inputs)
            step.backward(output.loss)
            assert isinstance(output.logits, DeferredLogits) and output.logits._whole is None
        step.update()
    with run.plain(), torch.no_grad():
        assert type(model(input_ids=torch.tensor([[7, 8, 9]])).logits) is torch.Tensor
    run.close()
    assert type(model(input_ids=torch.tensor([[7, 8, 9]])).logits) is torch.Tensor


def test_a_loss_of_ones_own_makes_no_matrix_either() -> None:
    torch.manual_seed(0)
    model = MODELS["tied"]()
    rows = [torch.randint(5, 61, (length,)).tolist() for length in (9, 4, 17, 6)]

    def loss_of(output, micro_batch):
        return F.cross_entropy(output.logits[0], micro_batch.targets)

    run = lw.prepare(model, rows, policy="dcp-intra", lr=1e-3, sequences_per_step=4, steps=1, loss=loss_of)
    for step in run.steps():
        for micro_batch in step:
            output = model(input_ids=micro_batch.tokens[None])
            step.backward(loss_of(output, micro_batch))
            assert output.logits._whole is None
        step.update()
    run.close()
