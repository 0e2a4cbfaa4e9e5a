"""Any model on a GPU: bytes as predicted, and a limit of the allocator that plans learn."""

import numpy as np
import pytest
import torch

import lengthwise

pytestmark = pytest.mark.gpu


def prepared(profile, **options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.0, 1.2, 400), 32, 8192).astype(int)
    corpus = [rng.integers(0, 1024, length) for length in lengths]
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    options = {"tokens_per_step": 32_768} | options
    return lengthwise.prepare(model, corpus, device="cuda", profile=profile, verbose=False, **options)


def steps_of(run):
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs).loss)
        result = step.update()
        yield step, result


def test_micro_batches_take_the_bytes_that_were_predicted(tmp_path):
    run = prepared(tmp_path / "profile.json", steps=20, memory_gib=2.0)
    ratios, losses = [], []
    for step, result in steps_of(run):
        losses.append(result.loss)
        for measured in step.measured:
            pipeline = step.plan.pipelines[measured.pipeline]
            planned = pipeline.micro_batches[measured.micro_batch]
            ratios.append(measured.peak_bytes / (planned.peak_bytes - pipeline.state_bytes))
    run.close()
    assert losses[-1] < losses[0]
    assert max(ratios) <= 1.05
    assert np.median(ratios) >= 0.8


def test_a_limit_of_the_allocator_that_no_plan_knew_of_is_learned(tmp_path):
    run = prepared(tmp_path / "profile.json", steps=2, tokens_per_step=16_384)
    total = torch.cuda.get_device_properties(run.world.device).total_memory
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved(run.world.device) + 600 * 2**20
    torch.cuda.set_per_process_memory_fraction(limit / total, run.world.device)
    try:
        results = [result for _, result in steps_of(run)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, run.world.device)
    run.close()
    assert any(result is None for result in results), "the limit was never met; lower it"
    assert sum(result is not None for result in results) == 2


def test_the_link_to_the_host_is_measured():
    from lengthwise.runtime.comm.world import start_world, stop_world
    from lengthwise.runtime.profile.measure_links import measure_links

    world = start_world("cuda")
    try:
        host = measure_links(world).host
    finally:
        stop_world(world)
    assert host.bytes_per_s > 1e9 and host.call_s < 1e-3
