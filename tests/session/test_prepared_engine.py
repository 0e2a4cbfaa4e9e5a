"""The engine by which `lengthwise train` drives prepared models: validation without noise, and steps that diverge."""

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.runtime.loop.prepared_engine import PreparedEngine
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import DivergedError
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of

pytestmark = pytest.mark.usefixtures("unchecked")

SAME = 1e-6
"""transformers computes the loss in float32."""
NUM_PLANS = 3


def gpt2():
    """Dropout at every place that GPT-2 has."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    dropouts = {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3}
    sizes = {"vocab_size": models.VOCAB, "n_positions": 96, "n_embd": 24, "n_layer": 3, "n_head": 4}
    config = GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).double()


def engine_of(**options):
    as_started_by_torchrun()
    run = lw.prepare(
        gpt2().train(), models.rows(), cost=models.mixed_cost(), memory_gib=40, sequences_per_step=8, steps=9,
        verbose=False, **{"policy": "dcp-intra"} | options,
    )  # fmt: skip
    return run, PreparedEngine(run, validation=run.collator)


def validate(options):
    """The loss over some plans; their sequences and degrees; and whether nothing has changed."""
    run, engine = engine_of(**options)
    plans = [run.planner(next(run.stream)) for _ in range(NUM_PLANS)]
    busy = [pipeline for plan in plans for pipeline in plan.pipelines if pipeline.micro_batches]
    before, generator = run.state.master.clone(), torch.get_rng_state()
    loss = engine.mean_loss(plans, run.collator.source)
    is_same = torch.equal(run.state.master, before) and torch.equal(torch.get_rng_state(), generator)
    is_same = is_same and all(module.training for module in run.model.modules())
    pushed = float(run.state.take_gradient().abs().sum())
    with engine.predicting() as logits_of:
        logits = None if logits_of is None else logits_of([5, 7, 9]).numpy()
    run.close()
    ids = [id for pipeline in busy for m in pipeline.micro_batches for id in m.pack.ids]
    return loss, ids, {p.scheme.degree for p in busy}, is_same and not pushed, logits


@pytest.mark.parametrize(
    ("num_ranks", "options", "degrees"),
    [
        pytest.param(2, {"recompute": "none"}, {1, 2}, marks=pytest.mark.deep),
        pytest.param(2, {"packing": "never"}, {1}, marks=pytest.mark.deep),
        (2, {"recompute": "none", "weights": "by-layer"}, {1, 2}),
    ],
)
@torch.no_grad()
def test_the_validation_loss_is_that_of_stock_calls_without_dropout(ranks, num_ranks, options, degrees):
    model, total, count = gpt2().eval(), 0.0, 0
    results = ranks(num_ranks).run(validate, options)
    rows = [torch.from_numpy(np.asarray(models.rows()[id]).astype(np.int64))[None] for id in results[0][1]]
    for tokens in (row for row in rows if row.shape[1] > 1):
        total += float(model(input_ids=tokens, labels=tokens).loss) * (tokens.shape[1] - 1)
        count += tokens.shape[1] - 1
    expected = model(input_ids=torch.tensor([[5, 7, 9]])).logits[0, -1]
    for rank, (loss, _, used, is_same, logits) in enumerate(results):
        assert loss == pytest.approx(total / count, rel=SAME)
        assert is_same and used <= degrees and (degrees == {1} or max(used) > 1)
        if rank == 0:
            np.testing.assert_allclose(logits, expected, rtol=1e-9)
        else:
            assert logits is None


def diverge():
    run, engine = engine_of()
    plan, before = run.planner(next(run.stream)), weights_of(run.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.state, "global_norm", lambda loss: (float("nan"), 0.0))
        with pytest.raises(DivergedError) as raised:
            engine.compute_step(plan, StepClock(run.world), lr=2e-3)
    is_same = all(np.array_equal(value, before[name]) for name, value in weights_of(run.model).items())
    result = engine.compute_step(plan, StepClock(run.world), lr=2e-3)
    run.close()
    return str(raised.value), is_same, result.lr


def test_a_step_that_diverges_says_what_the_user_of_a_configuration_can_do(ranks):
    ((words, is_same, lr),) = ranks(1).run(diverge)
    assert words.startswith("step 0: loss ") and "gradient norm nan are not both finite" in words
    assert words.endswith(
        "Lower optim.lr (now 2.00e-03), set optim.clip_norm, or look at the step's sequences in plans.jsonl"
    )
    assert is_same and lr == 2e-3


def is_in_packs():
    """Of a mixture of experts as transformers makes it, which multiplies tokens in groups, sorted by expert."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    as_started_by_torchrun()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=models.VOCAB, **sizes, **experts))
    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=40, steps=1, verbose=False)
    run.close()
    return model.config._experts_implementation, run.wrapped_model.by_sequence is None


def test_experts_that_are_multiplied_in_groups_are_computed_in_packs(ranks):
    assert ranks(2).run(is_in_packs) == [("grouped_mm", True)] * 2
