"""Gradients of TRL's own losses on its own batches are those of the examples' loops, on any number of ranks."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.session.pairs import prepared

EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""
BETA, CLIP = 0.3, 0.2
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=40, bos_token_id=None, eos_token_id=1, pad_token_id=0, **SIZES)
    ).double()


def answered(prompt, answer):
    return {"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)}


def logps_t(model, micro_batch):
    logits = model(**micro_batch.inputs).logits[0]
    return -F.cross_entropy(logits, micro_batch.labels, reduction="none", ignore_index=-100)


def gradients_of(run, step):
    """The update's gradient by name: what plain SGD at rate 1 takes off the weights."""
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    loss = step.update().loss
    run.close()
    return loss, {name: before[name] - parameter.detach() for name, parameter in run.model.named_parameters()}


def dpo(pairs):
    """Loss and gradients of one step over pairs whose answers may lie on different ranks."""
    model, reference = llama(0), llama(1)
    run = prepared(
        pairs, model=model, frozen=[reference], lr=1.0, sequences_per_step=len(pairs), steps=1,
        coupled_loss=lambda gains: -F.logsigmoid(BETA * (gains[:, 0] - gains[:, 1])).mean(),
    )  # fmt: skip
    step = next(run.steps())
    for micro_batch in step:
        with torch.no_grad():
            expected = micro_batch.per_sequence(logps_t(reference, micro_batch))
        step.couple(micro_batch.per_sequence(logps_t(model, micro_batch)) - expected)
    return gradients_of(run, step)


def grpo(items):
    """Loss and gradients of one step over rollouts."""
    run = prepared(items, model=llama(0), loss_columns=("mask", "old", "expected", "advantage"), lr=1.0)
    step = run.step(items[run.world.rank :: run.world.size])
    for micro_batch in step:
        columns = (micro_batch.column(name, of="targets") for name in ("mask", "old", "expected", "advantage"))
        (mask, old, expected, advantage), logps = columns, logps_t(run.model, micro_batch)
        ratio, gap = (logps - old).exp(), expected - logps
        gains = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        losses = BETA * (gap.exp() - gap - 1) * ratio - gains  # the divergence is weighed by the ratio (TRL 1.16)
        step.backward(micro_batch.sum(losses * mask) / step.total("mask"), mean_over="step")
    return gradients_of(run, step)


def rows(name, *keys, content=None):
    """A dataset of given rows, or of four with these columns of text."""
    import datasets

    content = content or [{key: f"{number} {key}" for key in keys} for number in range(4)]
    return datasets.Dataset(datasets.table.InMemoryTable.from_pylist(content), fingerprint=name)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["<pad>", "<eos>", "?"])}, "?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def settings(kind, folder, **options):
    return kind(str(folder), use_cpu=True, report_to="none", bf16=False, gradient_checkpointing=False, **options)


def assert_equal(trained, expected_loss, model):
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-4
    for loss, gradients in trained:
        assert loss == pytest.approx(float(expected_loss), rel=EXACT)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=EXACT, msg=name)


class LogProbsInDouble:
    """TRL's log-probabilities of a head, which it computes in float32 whatever the model is in."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_):
        log_probs = (hidden @ weight.T / temperature).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1).detach()
        zeros = torch.zeros_like(entropy)  # for what metrics are made of
        return log_probs.gather(-1, labels[:, None])[:, 0], entropy, zeros, zeros, zeros.bool()


@pytest.fixture
def trl(monkeypatch):
    installed = pytest.importorskip("trl", reason="trl is not installed")
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", LogProbsInDouble)
    return installed


def test_dpo_has_the_gradients_of_trl(ranks, trl, tmp_path):
    rng = np.random.default_rng(0)
    parts = [[rng.integers(2, 40, n).tolist() for n in rng.integers(1, 20, 3)] for _ in range(7)]
    model = llama(0)
    trainer = trl.DPOTrainer(
        model, llama(1), args=settings(trl.DPOConfig, tmp_path, beta=BETA), processing_class=tokenizer(),
        train_dataset=rows("pairs", "prompt", "chosen", "rejected"),
    )  # fmt: skip
    batch = trainer.data_collator([dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), part)) for part in parts])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    pairs = [(answered(prompt, chosen), answered(prompt, rejected)) for prompt, chosen, rejected in parts]
    assert_equal(ranks(2).run(dpo, pairs), loss, model)


def test_grpo_has_the_gradients_of_trl(ranks, trl, tmp_path):
    rng = np.random.default_rng(1)
    model, sizes = llama(0), {"num_generations": 4, "per_device_train_batch_size": 8}
    trainer = trl.GRPOTrainer(
        model, lambda **batch: [0.0], args=settings(trl.GRPOConfig, tmp_path, loss_type="dapo", **sizes),
        processing_class=tokenizer(), train_dataset=rows("prompts", "prompt"),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.beta = BETA  # at first it is 0, for its reference is read from a folder
    # Prompts of one length: rotary factors of positions that padding shifts differ in float32.
    prompts, answers = np.full(8, 6), rng.integers(1, 12, 8)
    ids = torch.tensor(rng.integers(2, 40, (8, 18)))
    place = torch.arange(18)
    is_prompt = (place < 6) & (place >= 6 - torch.tensor(prompts)[:, None])
    is_answer = (place >= 6) & (place < 6 + torch.tensor(answers)[:, None])
    columns = {name: torch.tensor(rng.normal(-4.0, 0.3, (8, 12))) for name in ("old", "expected")}
    advantage = torch.tensor(rng.normal(size=8))
    batch = {
        "prompt_ids": ids[:, :6], "prompt_mask": is_prompt[:, :6].long(), "completion_ids": ids[:, 6:],
        "completion_mask": is_answer[:, 6:].long(), "advantages": advantage, "num_items_in_batch": is_answer.sum(),
        "old_per_token_logps": columns["old"], "ref_per_token_logps": columns["expected"],
    }  # fmt: skip
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    items = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers)):
        kept = is_prompt[number] | is_answer[number]
        padded = {name: F.pad(values[number, :answer], (prompt, 0)).numpy() for name, values in columns.items()}
        masks = {"mask": is_answer[number][kept].long().numpy(), "advantage": float(advantage[number])}
        items.append({"input_ids": ids[number][kept].tolist(), **masks, **padded})
    assert_equal(ranks(2).run(grpo, items), loss, model)


def sft_trainer(trl, folder):
    """TRL's trainer of four steps over prompts and answers, of which the answers have a loss."""
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
    }
    options |= {
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "completion_only_loss": True,
        "save_strategy": "no",
    }
    rng = np.random.default_rng(2)
    content = [
        {"input_ids": rng.integers(2, 40, length).tolist(), "completion_mask": [0, *[1] * (length - 1)]}
        for length in rng.integers(3, 20, 4).tolist()  # all of them in every step, in whatever order
    ]
    data = rows("answers", content=content)
    return trl.SFTTrainer(
        llama(0), args=settings(trl.SFTConfig, folder, **options), train_dataset=data, processing_class=tokenizer()
    )


def test_the_trainer_goes_on_with_what_sft_prepared(trl, tmp_path):
    import lengthwise

    losses = []
    for name in ("theirs", "ours"):
        trainer = sft_trainer(trl, tmp_path / name)
        if name == "ours":
            trainer = lengthwise.Trainer(
                model=trainer.model, args=trainer.args, train_dataset=trainer.train_dataset,
                data_collator=trainer.data_collator,
            )  # fmt: skip
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5), "logs are in float32"
