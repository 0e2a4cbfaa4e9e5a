"""What loops do between steps: gradients they leave, rates and hooks they set, models that others train or freeze."""

import logging
from functools import cache, partial

import pytest
import torch
import transformers
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.structure_runs import LENGTHS, LR, OPTIONS, plan_of, rows
from tests.session.test_prepare import assert_equal_weights

pytestmark = pytest.mark.usefixtures("unchecked")

LEFT = "gradients of a backward before it are no part of it"


def probe_nothing(run, model):
    pass


def probe_and_leave(run, model):
    with run.plain():
        model(torch.arange(7)[None])[0].square().mean().backward()


def probe_and_clear(run, model):
    probe_and_leave(run, model)
    model.zero_grad()


def clear_and_probe(run, model):
    model.zero_grad()
    probe_and_leave(run, model)


def probe_to_zero(run, model):
    probe_and_leave(run, model)
    model.zero_grad(set_to_none=False)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def train(probes, kinds, **options):
    """By probe and kind of plan: the weights after three steps with the probe after each, and how often it is said."""
    as_started_by_torchrun()
    logging.getLogger("lengthwise").addHandler(lines := Lines())
    found = {}
    for probe in probes:
        for kind in kinds:
            lines.said.clear()
            run = lw.prepare(model := models.gpt(), rows(), steps=3, **OPTIONS | options)
            run.planner = partial(plan_of, kind, 3, run.world.size, run.can_recompute)
            for step in run.steps():
                for micro_batch in step:
                    step.backward(model(**micro_batch.inputs)[1])
                step.update()
                probe(run, model)
            run.close()
            found[probe.__name__, kind] = weights_of(model), sum(LEFT in line for line in lines.said)
    logging.getLogger("lengthwise").removeHandler(lines)
    return found


PROBES = (probe_nothing, probe_and_leave, probe_and_clear, clear_and_probe, probe_to_zero)


LEFT_IN_DEEP_RUNS = [
    ({}, (2, PROBES)), ({"weights": "by-layer"}, (1, PROBES)), ({"offload_state": "host"}, (2, PROBES)),
]  # fmt: skip


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("options", "size", "probes"),
    # In what way gradients are left is told apart before any plan is looked at.
    [
        ({}, 1, PROBES), ({}, 2, PROBES[:2]),
        ({"weights": "by-layer"}, 2, PROBES), ({"offload_state": "host"}, 1, PROBES),
        *(pytest.param(options, *way, marks=pytest.mark.deep) for options, way in LEFT_IN_DEEP_RUNS),
    ],
)  # fmt: skip
def test_gradients_that_a_loop_leaves_between_steps_are_no_part_of_the_next(ranks, size, probes, options):
    if options:
        probes = probes[:2]
    kinds = ("ulysses", "stages") if size > 1 and not options else ("alone",)
    found = ranks(size).run(partial(train, probes, kinds, **options))[0]
    for (probe, kind), (weights, num_lines) in found.items():
        assert_equal_weights(weights, found["probe_nothing", kind][0])
        if not options:
            assert num_lines == (1 if probe in ("probe_and_leave", "clear_and_probe") else 0), (probe, kind)


def prepared(model=None, **options):
    model = models.gpt() if model is None else model
    settings = OPTIONS | {"steps": 3} | options
    if "optimizer" in options:
        del settings["lr"]
    return lw.prepare(model, rows(), **settings), model


def compute(run, model, step, loss_of=lambda model, micro_batch: model(**micro_batch.inputs)[1]):
    for micro_batch in step:
        step.backward(loss_of(model, micro_batch))
    return step.update()


def set_by_hand(optimizer):
    optimizer.param_groups[0]["lr"] = 0.05


def set_by_schedule(optimizer):
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("change", [set_by_hand, set_by_schedule])
def test_a_rate_that_a_loop_sets_on_its_own_optimizer_is_refused_and_not_overwritten(change):
    made = []

    def optimizer(groups):
        made.append(torch.optim.SGD(groups, lr=0.1))
        return made[-1]

    run, model = prepared(optimizer=optimizer)
    assert compute(run, model, next(run.steps())).lr == compute(run, model, next(run.steps())).lr == 0.1
    change(made[-1])
    with pytest.raises(
        CheckError, match=r"lr of a parameter group of optimizer= was set to 0\.0.*give the schedule as lr="
    ):
        compute(run, model, next(run.steps()))
    run.close()


def test_a_hook_that_comes_after_prepare_and_sees_parts_of_gradients_is_refused():
    run, model = prepared()
    compute(run, model, next(run.steps()))
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    with pytest.raises(InputError, match=r"head\.weight has a hook that runs after its gradient was accumulated"):
        compute(run, model, next(run.steps()))
    run.close()


def test_weights_that_another_run_trains_are_refused_in_words():
    run, model = prepared()
    other = models.gpt(seed=1)
    other.tokens = model.tokens
    with pytest.raises(InputError, match=r"another run trains its tokens\.weight.*run\.close\(\)"):
        prepared(other)
    run.close()
    prepared(other)[0].close()


class Critic(models.GPT):
    """A score of each token, of tokens or of what stands in for their embeddings."""

    def forward(self, idx=None, inputs_embeds=None):
        x = self.tokens(idx) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).logsumexp(-1)


def test_a_frozen_model_that_is_to_pass_a_gradient_on_is_refused():
    torch.manual_seed(1)
    critic = Critic().double()
    run, model = prepared(frozen=[critic])

    def loss(model, micro_batch, *, detached):
        logits, loss = model(**micro_batch.inputs)
        hidden = logits.softmax(-1) @ critic.tokens.weight
        return loss + 0 * critic(inputs_embeds=hidden.detach() if detached else hidden).sum()

    compute(run, model, next(run.steps()), partial(loss, detached=True))
    with pytest.raises(InputError, match="Critic is frozen and was called with a tensor that has a gradient"):
        compute(run, model, next(run.steps()), partial(loss, detached=False))
    run.close()


class Short(Critic):
    """Takes no more than twenty tokens."""

    def forward(self, idx=None, inputs_embeds=None):
        assert idx.shape[1] <= 20, "no more"
        return super().forward(idx)


def test_a_frozen_model_that_fails_on_a_pack_is_told_how_many_slots_it_got_and_how_packs_are_limited():
    torch.manual_seed(1)
    short = Short().double()

    def loss(model, micro_batch):
        short(micro_batch.inputs["idx"])
        return model(**micro_batch.inputs)[1]

    run, model = prepared(frozen=[short], check=False)
    said = r"(?s)Short, which is frozen, fails on a pack of \d+ slots \(AssertionError: no more.*max_tokens="
    with pytest.raises(InputError, match=said):
        compute(run, model, next(run.steps()), loss)
    run.close()


def test_a_run_is_closed_at_the_end_of_a_with_statement():
    run, model = prepared()
    with run as entered:
        assert entered is run
        compute(run, model, next(run.steps()))
    with pytest.raises(CheckError, match=r"after run\.close\(\)"):
        next(run.steps())


def test_a_rate_may_be_set_as_a_number_and_no_limit_of_the_norm_is_none():
    for clip_norm in (None, float("inf"), 0):
        run, model = prepared(clip_norm=clip_norm)
        assert run.clip_norm == 0
        run.lr = 0.25
        assert compute(run, model, next(run.steps())).lr == 0.25
        run.close()


def test_attention_weights_and_losses_that_a_forward_did_not_make_are_said_to_be_missing():
    run, model = prepared()
    step = next(run.steps())
    for micro_batch in step:
        with pytest.raises(InputError, match=r"output_attentions=True.*run\.plain\(\)"):
            model(micro_batch.inputs["idx"], output_attentions=True)
        logits, _ = model(micro_batch.inputs["idx"])
        with pytest.raises(
            CheckError, match=r"of a forward that made none, such as one without labels.*mean_over='targets'"
        ):
            step.backward(logits.square().mean())
        break
    run.close()


def test_what_torch_compile_makes_of_a_prepared_model_is_refused_with_the_way_to_compile():
    run, model = prepared()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(InputError, match=r"leave torch\.compile out.*compile=True"):
        compute(run, compiled, next(run.steps()))
    run.close()


class Switched(models.GPT):
    gates = False

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.mlp[1].forward = lambda x: F.gelu(x).sigmoid() if Switched.gates else F.gelu(x)


def freeze(model, is_begin):
    model.blocks[1].mlp.requires_grad_(not is_begin)


def switch(model, is_begin):
    Switched.gates = not is_begin


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (freeze, r"its mlp\.0\.weight\.requires_grad was False and is True, and 3 further flags"),
        (switch, "something that it computes with has changed"),
    ],
)
def test_a_layer_that_is_recomputed_as_something_else_is_named_with_the_way_out(change, message):
    torch.manual_seed(0)
    run, model = prepared(Switched().double(), recompute="all")
    step = next(run.steps())
    with run, pytest.raises(CheckError, match=rf"layer \d \(Block\) .*: {message}.*recompute='none'"):
        for micro_batch in step:
            change(model, True)
            loss = model(**micro_batch.inputs)[1]
            change(model, False)
            step.backward(loss)


class WithCritic(torch.nn.Module):
    """A model whose frozen part passes gradients on, as a differentiable reward does."""

    def __init__(self):
        super().__init__()
        self.policy, self.critic = models.GPT(), Critic().requires_grad_(False)

    def forward(self, idx):
        logits, _ = self.policy(idx)
        return logits, self.critic(inputs_embeds=logits.softmax(-1) @ self.critic.tokens.weight)


def loss_of_tokens(output, micro_batch):
    return F.cross_entropy(output[0][0], micro_batch.targets)


def train_with_critic(kinds):
    """By kind of plan: the weights after two steps."""
    as_started_by_torchrun()
    found = {}
    for kind in kinds:
        torch.manual_seed(0)
        run, model = prepared(WithCritic().double(), layers="policy.blocks", loss=loss_of_tokens, steps=2)
        run.planner = partial(plan_of, kind, 3, run.world.size, run.can_recompute)
        for step in run.steps():
            for micro_batch in step:
                output = model(**micro_batch.inputs)
                score = micro_batch.mean(output[1][0], over="tokens")
                step.backward(loss_of_tokens(output, micro_batch), side=0.1 * score)
            step.update()
        run.close()
        found[kind] = weights_of(model)
    return found


def test_a_frozen_part_of_the_trained_model_passes_gradients_on(ranks):
    torch.manual_seed(0)
    alone = WithCritic().double()
    optimizer = torch.optim.SGD([x for x in alone.parameters() if x.requires_grad], lr=LR)
    rows_of = [torch.as_tensor(row)[None] for row in rows()]
    for _ in range(2):
        optimizer.zero_grad()
        outputs = [(row, *alone(row)) for row in rows_of]
        losses = sum(F.cross_entropy(x[0, :-1], row[0, 1:], reduction="sum") for row, x, _ in outputs)
        scores = sum(y.sum() for _, _, y in outputs)
        (losses / (sum(LENGTHS) - len(LENGTHS)) + 0.1 * scores / sum(LENGTHS)).backward()
        optimizer.step()
    for weights in ranks(2).run(partial(train_with_critic, ("alone", "ulysses")))[0].values():
        assert_equal_weights(weights, weights_of(alone))


def train_with_side(kinds):
    """By kind of plan: the weights after two steps of a loss beside a mean over tokens."""
    as_started_by_torchrun()
    found = {}
    for kind in kinds:
        run, model = prepared(steps=2)
        run.planner = partial(plan_of, kind, 3, run.world.size, run.can_recompute)
        for step in run.steps():
            for micro_batch in step:
                logits, loss = model(**micro_batch.inputs)
                step.backward(loss, side=micro_batch.mean(logits[0].logsumexp(-1).square(), over="tokens"))
            step.update()
        run.close()
        found[kind] = weights_of(model)
    return found


def test_a_term_beside_the_loss_is_the_same_in_stages(ranks):
    found = ranks(2).run(partial(train_with_side, ("alone", "stages")))[0]
    assert_equal_weights(found["stages"], found["alone"])


HOOKS = {
    "full backward": lambda head: head.register_full_backward_hook(lambda module, inputs, outputs: None),
    "backward pre": lambda head: head.register_full_backward_pre_hook(lambda module, outputs: None),
    "forward": lambda head: head.register_forward_hook(lambda module, args, output: None),
    "of all modules": lambda head: torch.nn.modules.module.register_module_full_backward_hook(lambda *of_module: None),
}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("name", "is_late"),
    # Before and after prepare, one kind does both, and others one of them.
    [
        pytest.param(name, is_late, marks=[pytest.mark.deep] * (number > 0 and is_late == number % 2))
        for number, name in enumerate(HOOKS) for is_late in (True, False)
    ],
)  # fmt: skip
def test_hooks_on_the_head_that_look_end_no_gradient(name, is_late):
    assert_equal_weights(trained_beside_a_hook(name, is_late), trained_beside_a_hook(None, False))


@cache
def trained_beside_a_hook(name, is_late):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=models.VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model, hook = transformers.LlamaForCausalLM(config).double(), HOOKS.get(name)
    handle = hook(model.lm_head) if hook and not is_late else None
    run, _ = prepared(model, steps=1, packing="always")
    handle = hook(model.lm_head) if hook and is_late else handle
    compute(run, model, next(run.steps()), lambda model, micro_batch: model(**micro_batch.inputs).loss)
    run.close()
    if handle is not None:
        handle.remove()
    return weights_of(model)


def penalty(model):
    return 0.01 * sum(x.square().sum() for x in model.parameters())


def test_a_penalty_on_weights_is_exact_in_a_mean_over_targets_and_refused_beside_a_loss():
    run, model = prepared(steps=2)
    before = float(penalty(model))
    step = next(run.steps())
    for micro_batch in step:
        step.backward(model(**micro_batch.inputs)[1] + penalty(model), mean_over="targets")
    with_penalty = step.update().loss
    run.close()
    other, same = prepared(steps=1)
    assert abs(with_penalty - before - compute(other, same, next(other.steps())).loss) < 1e-9
    step = next((again := prepared(steps=1))[0].steps())
    with pytest.raises(InputError, match=r"side= is added as it is for every micro-batch.*mean_over='targets'"):
        for micro_batch in step:
            step.backward(again[1](**micro_batch.inputs)[1], side=penalty(again[1]))
    again[0].close()
