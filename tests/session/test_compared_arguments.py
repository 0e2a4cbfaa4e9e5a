"""A call of a loop has no arguments that packs were never compared with."""

from functools import cache

import numpy as np
import pytest
import torch
import transformers

import lengthwise as lw
from lengthwise.core.errors import InputError
from tests.session.structure_runs import OPTIONS, rows
from tests.session.structures import Plain

REFUSED = {
    "the items of a batch": ("llama", {"num_items_in_batch": 40}, "by which it divides its loss.*leave it out"),
    "a flag of its own": ("mixing", {"mixes": True}, "argument 'mixes', which micro_batch.inputs has not.*inputs="),
    "a tensor": ("mixing", {"mixes": torch.ones(1)}, "packs were not compared with it"),
    "positions through the pack": (
        "gpt2",
        {"position_ids": "row"},
        r"do not begin anew with each.*micro_batch.positions\[None\]",
    ),
    "after those of padding": ("gpt2", {"position_ids": "later"}, "leave position_ids out"),
    "halves of them": ("rounded", {"pos": "half"}, "do not begin anew with each sequence"),
    "a label's name": ("mixing", {"y": 1}, "argument 'y', which micro_batch.inputs has not"),
    "none for a default": ("window", {"window": None}, "argument 'window'"),
    "those of a module": ("placed", {"pos": "row"}, "several sequences or a part of one; leave pos out"),
}
LIKE_OTHERS = ("after those of padding", "those of a module", "a label's name")
TAKEN = {
    "what is the default": ("mixing", {"mixes": False}),
    "what is not there": ("mixing", {"y": None}),
    "an equal one": ("mixing", {"mixes": np.bool_(False)}),
    "what is returned": ("llama", {"output_hidden_states": True, "return_dict": True, "num_items_in_batch": None}),
    "its own positions": ("gpt2", {"position_ids": "own"}),
    "positions of its own": ("placed", {"pos": "shifted"}),
}
LIKE_AN_EQUAL_ONE = ("what is the default", "what is not there")


class Mixing(Plain):
    """Adds the mean of a row if it is told to."""

    def forward(self, idx, targets=None, mixes=False, y=None):
        x = self.run(self.embed(idx), idx)
        return self.end(
            x + x.mean(1, keepdim=True) if mixes is not None and mixes not in (False, [0.0]) else x, targets
        )


class Windowed(Plain):
    def forward(self, idx, targets=None, window=1):
        return super().forward(idx, targets)


class Placed(Plain):
    def forward(self, idx, targets=None, pos=None):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]) if pos is None else pos)
        return self.end(self.run(x, idx), targets)


class Rounded(Placed):
    def forward(self, idx, targets=None, pos=None):
        return super().forward(idx, targets, None if pos is None else pos.long())


def built(kind):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=71, **sizes)).double()
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=71, n_positions=80)
        return transformers.GPT2LMHeadModel(config).eval().double()
    return {"mixing": Mixing, "window": Windowed, "placed": Placed, "rounded": Rounded}[kind]().double()


@cache
def stepped_plainly(kind):
    return stepped(kind, {})


def stepped(kind, arguments, **options):
    """Train a step, by calls with further arguments."""
    model = built(kind)
    run = lw.prepare(model, rows(), steps=1, **OPTIONS | options)
    try:
        for step in run.steps():
            for micro_batch in step:
                positions = micro_batch.positions[None]
                row = torch.arange(positions.shape[1])[None]
                places = {
                    "row": row, "later": row + 1, "half": row / 2, "own": positions.clone(), "shifted": positions + 1,
                }  # fmt: skip
                given = {name: places[v] if isinstance(v, str) else v for name, v in arguments.items()}
                output = model(**{**micro_batch.inputs, **given})
                step.backward(output.loss if kind in ("llama", "gpt2") else output[1])
            step.update()
    finally:
        run.close()
    return model


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.deep] * (case in LIKE_OTHERS)) for case in REFUSED]
)
def test_an_argument_that_no_comparison_had_is_refused(case):
    kind, arguments, said = REFUSED[case]
    with pytest.raises(InputError, match=said):
        stepped(kind, arguments)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.deep] * (case in LIKE_AN_EQUAL_ONE)) for case in TAKEN]
)
def test_one_that_changes_nothing_is_taken(case):
    kind, arguments = TAKEN[case]
    model = stepped(kind, arguments)
    if case != "positions of its own":
        assert all(map(torch.equal, model.parameters(), stepped_plainly(kind).parameters()))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (False, True),
        pytest.param(torch.tensor(0.0), torch.tensor(1.0), marks=pytest.mark.deep),
        pytest.param(np.float32(0), np.float32(1), marks=pytest.mark.deep),
        pytest.param([0.0], [1.0], marks=pytest.mark.deep),
    ],
    ids=["a flag", "a tensor", "a number of NumPy", "a list"],
)
def test_a_number_that_inputs_makes_is_the_one_that_packs_were_compared_with(first, then):
    mixes = [first]

    def inputs(micro_batch):
        made = {"idx": micro_batch.tokens[None], "targets": micro_batch.targets[None]}
        return made | {"mixes": mixes[0]}

    model = built("mixing")
    run = lw.prepare(model, rows(), steps=2, inputs=inputs, **OPTIONS)
    with pytest.raises(InputError, match=r"called with mixes=.*, and packs were compared with mixes=.* alone"):
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
            step.update()
            mixes[0] = then
    run.close()


def test_what_a_frozen_model_is_called_with_is_looked_at_too():
    teacher, model = built("placed"), built("mixing")
    run = lw.prepare(model, rows(), steps=1, frozen=[teacher], **OPTIONS)
    step = next(run.steps())
    for micro_batch in step:
        idx = micro_batch.inputs["idx"]
        teacher(idx, pos=micro_batch.positions[None])
        if len(micro_batch.pack.ids) > 1:
            with pytest.raises(InputError, match="do not begin anew with each sequence"):
                teacher(idx, pos=torch.arange(idx.shape[1])[None])
            break
        step.backward(model(**micro_batch.inputs)[1])
    assert len(micro_batch.pack.ids) > 1
    run.close()
