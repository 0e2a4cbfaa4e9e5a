"""What is a softmax over keys without being called so makes weights; what is none is refused by what it does."""

import copy

import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import InputError
from tests.session import models
from tests.session.loops import step_through

pytestmark = pytest.mark.usefixtures("unchecked")

OPTIONS = {"cost": models.mixed_cost(), "memory_gib": 40, "lr": 0.5, "optimizer": "sgd", "weight_decay": 0.0}
OPTIONS |= {"clip_norm": 0.0, "steps": 1, "sequences_per_step": 40, "verbose": False, "packing": "always"}


def exponentials(a):
    a = a.exp()
    return a / a.sum(-1, keepdim=True)


def stable_exponentials(a):
    a = torch.exp(a - a.max(dim=-1, keepdim=True).values)
    return torch.div(a, a.sum(dim=-1, keepdim=True))


SOFTMAXES = {
    "exp": exponentials,
    "stable exp": stable_exponentials,
    "stable": lambda a: (a - a.amax(-1, keepdim=True).detach()).softmax(-1),
    "log_softmax": lambda a: F.log_softmax(a.float(), dim=-1).exp().type_as(a),
    "logsumexp": lambda a: (a - a.logsumexp(-1, keepdim=True)).exp(),
}
OTHERS = {
    "no softmax": (lambda a: a.relu(), "multiplies its logits by its values without a softmax over keys"),
    "a sum of more": (lambda a: a.exp() / (a.exp().sum(-1, keepdim=True) + 1e-3), "calls add between"),
    "a sum of others": (lambda a: a.exp() / (2 * a).exp().sum(-1, keepdim=True), "calls div between"),
    "another dimension": (lambda a: a / a.exp().sum(-2, keepdim=True), "calls sum between"),
    "exponentials of weights": (lambda a: a.softmax(-1).exp(), "calls exp between"),
    "a clamp of what is shifted": (
        lambda a: (a - a.amax(-1, keepdim=True)).clamp(min=-10.0).softmax(-1),
        "calls clamp between",
    ),
    "minus the mean": (lambda a: (a - a.mean(-1, keepdim=True)).softmax(-1), "calls sub between"),
}


class ByHand(models.Attention):
    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2) for part in self.qkv(x).chunk(3, -1))
        logits = q @ k.transpose(-2, -1) / self.num_heads
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = self.softmax(logits.masked_fill(hidden, -torch.inf)) @ v
        return self.out(y.transpose(-3, -2).flatten(-2))


def model_of(softmax):
    torch.manual_seed(0)
    model = models.GPT(num_layers=2).double()
    for block in model.blocks:
        block.attention.__class__, block.attention.softmax = ByHand, softmax
    return model


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.deep] * (name in ("exp", "logsumexp", "stable"))) for name in SOFTMAXES],
)
def test_a_softmax_that_is_written_out_is_computed_in_packs(name):
    model = model_of(SOFTMAXES[name])
    stock, rows = copy.deepcopy(model), models.rows()
    run = lw.prepare(model, rows, **OPTIONS)
    step_through(run)
    run.close()
    stock.zero_grad()
    for row in rows:
        tokens = torch.as_tensor(row)[None]
        loss = stock(tokens[:, :-1], tokens[:, 1:])[1]
        (loss * (len(row) - 1) / sum(len(row) - 1 for row in rows)).backward()
    torch.optim.SGD(stock.parameters(), lr=OPTIONS["lr"]).step()
    exact = 1e-6 if name == "log_softmax" else 1e-10  # which rounds to float32 in the stock model
    for (name, value), expected in zip(model.named_parameters(), stock.parameters()):
        torch.testing.assert_close(value, expected, rtol=0, atol=exact, msg=name)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_softmax_is_refused_by_what_it_does(name):
    function, message = OTHERS[name]
    with pytest.raises(InputError, match=rf"a model that attends by hand ({message})"):
        lw.prepare(model_of(function), models.rows(), **OPTIONS)
