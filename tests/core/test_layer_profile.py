"""What identifies a profile."""

from dataclasses import replace

from lengthwise.core.layer_profile import Identity

IDENTITY = Identity(
    model_name="Gpt", model_digest="0123", device="cpu", dtype="float32", num_ranks=4, software="torch 2.13"
)


def test_models_that_differ_only_in_how_they_are_computed_are_told_apart_by_that_alone():
    compiled = replace(IDENTITY, model_digest="0123, compiled by inductor", num_ranks=2)
    assert IDENTITY.differences(compiled) == [
        "num ranks 2 instead of 4", "model variant compiled by inductor instead of none",
    ]  # fmt: skip
    assert IDENTITY.differences(replace(IDENTITY, model_digest="4567")) == ["model digest 4567 instead of 0123"]
