"""Compiled layers: they compute what layers compute, for any pack of their sizes, and are compiled once."""

from dataclasses import replace

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.compile import graphs
from lengthwise.runtime.compile.compiled_layers import CompiledLayers
from lengthwise.runtime.compile.graphs import check_compiler, mode_of
from lengthwise.runtime.models.registry import build_model

EXACT = 1e-12
"""float64: compiled sums may round in another order."""
LLAMA = ModelSpec(
    name="test", num_layers=3, hidden_size=12, ffn_size=20, num_heads=4, num_kv_heads=2, head_size=6, vocab_size=37
)
BIASED = {"gated_ffn": False, "qkv_bias": True, "max_positions": 40}
GPT = replace(LLAMA, family="gpt", **BIASED)
BERT = replace(LLAMA, family="bert", causal=False, **BIASED)
SIZES = (48, 32)
PACKS = ((0, 10, 30, 48), (0, 16, 32), (0, 12, 24, 36, 48), (0, 1, 31, 32))
"""Unequal sequences, and rows of one length as padded batches have them."""
CPU = torch.device("cpu")


def results(model, cu_seqlens, *, recompute):
    """Loss and gradients of a pack."""
    tokens = torch.arange(cu_seqlens[-1]) * 7 % 37
    model.zero_grad()
    loss = model(tokens, cu_seqlens, tokens.roll(-1), recompute=recompute)
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        (BERT, "eager"),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in ((LLAMA, "eager"), (LLAMA, "aot_eager"), (GPT, "eager"))
        ),
    ],
)
def test_they_compute_what_layers_compute_with_and_without_recompute_and_are_never_compiled_again(spec, backend):
    model = build_model(spec, dtype=torch.float64)
    flags = [(False,) * 3, (True, False, True)]
    expected = [results(model, pack, recompute=flag) for pack in PACKS for flag in flags]
    told = []
    compiled = CompiledLayers(CPU, SIZES[::-1], backend=backend, on_size=lambda *at: told.append(at))
    before = [torch.random.get_rng_state(), *(x.clone() for w in model.parameters() for x in (w, w.grad))]
    compiled.warm_up(model)
    after = [torch.random.get_rng_state(), *(x for w in model.parameters() for x in (w, w.grad))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert told == [(1, 2), (2, 2)]
    model.run_layer = compiled
    found = [results(model, pack, recompute=flag) for pack in PACKS for flag in flags]
    for ours, theirs in zip(found, expected):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)
    assert compiled.recompiles() == 0


def test_an_unknown_size_is_computed_too_and_counted():
    model = build_model(LLAMA, dtype=torch.float64)
    expected = results(model, (0, 9), recompute=None)
    model.run_layer = compiled = CompiledLayers(CPU, SIZES[:1], backend="eager")
    compiled.warm_up(model)
    torch.testing.assert_close(results(model, (0, 9), recompute=None), expected, rtol=EXACT, atol=EXACT)
    assert compiled.recompiles() == 2, "the halves before and after attention, shared by all layers"
    assert compiled.recompiles() == 0


def test_code_of_too_many_sizes_is_freed_between_steps_and_never_that_of_the_sizes_at_hand(monkeypatch):
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(True))
    compiled = CompiledLayers(CPU, (), backend="eager", most_live=2)
    for sizes, count in [((1, 2), 0), ((2,), 0), ((3,), 1), ((2, 3), 1), ((3,), 1), ((1, 2, 4), 2), ((1, 2, 4), 2)]:
        compiled.make_room(sizes)
        assert len(resets) == count, sizes


def test_without_a_compiler_a_cpu_run_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(graphs.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"no g\+\+ here; install g\+\+ .* train without train\.compile"):
        check_compiler(CPU, "inductor")
    check_compiler(CPU, "eager")
    check_compiler(torch.device("cuda"), "inductor")


def test_cuda_graphs_are_for_one_gpu():
    assert mode_of(CPU, cuda_graphs=True) is None
    assert mode_of(torch.device("cuda"), cuda_graphs=True) == "max-autotune"
    assert mode_of(torch.device("cuda"), cuda_graphs=False) == "max-autotune-no-cudagraphs"
