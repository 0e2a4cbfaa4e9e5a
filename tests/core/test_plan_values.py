"""Every value of a plan's document is checked by itself: bounds to the last digit, types exactly, fields by name."""

import copy
import re

import pytest

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import MOST_TOKENS
from lengthwise.core.lr_scaling import MAX_LR_FACTOR
from lengthwise.core.pipeline_config import dense_scheme
from lengthwise.core.plan_values import (
    MAX_BYTES,
    MAX_HEAD_GROUPS,
    MAX_ID,
    MAX_LAYERS,
    MAX_PACK_TOKENS,
    MAX_SECONDS,
    check_plan_values,
)
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import MAX_DEVICES
from lengthwise.core.step_plan import Pipeline, StepPlan

SCHEME, PIPELINE = ("schemes", 0), ("pipelines", 0)
MICRO_BATCH = (*PIPELINE, "micro_batches", 0)


def document():
    """That of a plan of two schemes and one pipeline of two micro-batches."""
    micro_batches = tuple(
        PlannedMicroBatch(pack=Pack(ids=(number,), lengths=(9,)), time_s=1.0, peak_bytes=8) for number in range(2)
    )
    pipelines = (
        Pipeline(ranks=(0,), scheme=dense_scheme(2), micro_batches=micro_batches),
        Pipeline(ranks=(0,), scheme=dense_scheme(2, recompute=True), micro_batches=(), phase=1),
    )
    plan = StepPlan(
        step=3, policy="auto", pipelines=pipelines, loss_normaliser=4, update_s=0.0, time_s=1.0, lower_bound_s=1.0
    )
    return plan.to_json()


def changed(keys, value):
    tree = plan = copy.deepcopy(document())
    for key in keys[:-1]:
        tree = tree[key]
    tree[keys[-1]] = value
    return plan


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("lower_bound_s",), 1.5, "lower_bound_s = 1.5 is above time_s = 1"),
        (
            (*PIPELINE, "micro_batches", 1, "ids"),
            [0],
            "micro_batches[1].ids has sequence 0, which pipelines[0].micro_b",
        ),
        ((*MICRO_BATCH, "comm_s"), 1000.0, "pipelines[0].micro_batches[0]: comm_s = 1000 is a part of time_s = 1 and"),
        (("pipelines", 1, "phase"), 0, ""),
    ],
)
def test_what_is_changed_by_hand_may_not_contradict_the_rest(keys, value, message):
    plan = changed(keys, value)
    del plan["digest"]
    if not message:  # of one phase
        plan["pipelines"].pop()
        plan["switch_s"], message = 0.5, "switch_s = 0.5, and a step of one phase switches nothing"
    with pytest.raises(InputError, match=re.escape(message)):
        StepPlan.from_json(plan)
    same = document()
    del same["digest"]
    assert StepPlan.from_json(same).digest == document()["digest"]


def whole(minimum, maximum):
    """Whole numbers that are taken, and values that are not."""
    return (minimum, maximum), (minimum - 1, maximum + 1, float(minimum), True, str(minimum), None)


def rows_of(minimum, maximum):
    """The same of lists of them."""
    lists = tuple([minimum, maximum, value] for value in whole(minimum, maximum)[1])
    return ([minimum], [minimum, maximum]), ([], (minimum,), minimum, None, *lists)


SECONDS = ((0, 0.0, 1, MAX_SECONDS), (-1e-9, MAX_SECONDS * 1.001, float("nan"), float("inf"), True, "1", None))
WORDS = (["dense"], ["dense", "ring"]), ("dense", ("dense",), ["dense", "magic"], [7], [["dense"]], None)
FLAG = (False, True, 0, 1), (2, -1, 1.0, "1", None, [1])
FLAGS = ([0, 1], [True, False], []), ([0, 2], [-1], [0.0, 1.0], ["0"], (0,), 0, None)
VALUES = {
    ("step",): whole(0, MAX_ID),
    ("policy",): (("", "a b", "x" * 100), ("x" * 101, "a\x1b[31m", 7, None, ["a"])),
    ("digest",): (("", "x" * 100), ("x" * 101, 7, None)),
    ("loss_normaliser",): whole(1, MAX_BYTES),
    **{(name,): SECONDS for name in ("update_s", "time_s", "lower_bound_s", "switch_s")},
    ("lr_factor",): ((1, 1e-9, MAX_LR_FACTOR), (0, -1.0, MAX_LR_FACTOR * 1.001, float("nan"), True, "1", None)),
    ("schemes",): ((), ([], {}, None, (7,), [7])),
    ("pipelines",): ((), ({}, None, (7,), [7])),
    (*SCHEME, "degree"): whole(1, MAX_DEVICES),
    (*SCHEME, "stage_layers"): (
        ([1], [MAX_LAYERS], [1, MAX_LAYERS - 1]), ([], [0], [MAX_LAYERS + 1], [1, MAX_LAYERS], [1.0], [True], 4, None)
    ),
    (*SCHEME, "methods"): WORDS,
    (*SCHEME, "recompute"): FLAGS,
    (*SCHEME, "offload"): FLAGS,
    (*SCHEME, "tile_tokens"): whole(0, MAX_PACK_TOKENS),
    (*SCHEME, "head_groups"): whole(1, MAX_HEAD_GROUPS),
    (*SCHEME, "shard_gradients"): FLAG,
    (*SCHEME, "keep_attention"): FLAG,
    (*SCHEME, "zero_bubble"): FLAG,
    (*SCHEME, "weights"): (("whole", "sharded"), ("half", "", 7, None, ["full"])),
    (*PIPELINE, "ranks"): rows_of(0, MAX_DEVICES - 1),
    (*PIPELINE, "phase"): whole(0, MAX_LAYERS),
    (*PIPELINE, "scheme"): whole(0, 1),
    (*PIPELINE, "state_bytes"): whole(0, MAX_BYTES),
    (*PIPELINE, "micro_batches"): (([],), ({}, None, (7,), [7])),
    (*MICRO_BATCH, "ids"): rows_of(0, MAX_ID),
    (*MICRO_BATCH, "lengths"): (
        ([1], [MAX_PACK_TOKENS - 1, 1], [MAX_PACK_TOKENS]),
        ([], [0], [1, MOST_TOKENS + 1], [9.0], [True], ["9"], 9, None, [MAX_PACK_TOKENS, 1]),
    ),
    (*MICRO_BATCH, "padded_to"): ((0, 9, MAX_PACK_TOKENS), (-1, MAX_PACK_TOKENS + 1, MOST_TOKENS + 1, 9.0, True, None)),
    (*MICRO_BATCH, "rows"): whole(0, MAX_ID),
    (*MICRO_BATCH, "filler"): ((0, MAX_PACK_TOKENS - 9), (-1, MAX_PACK_TOKENS - 8, MOST_TOKENS + 1, 1.0, True, None)),
    (*MICRO_BATCH, "time_s"): SECONDS,
    (*MICRO_BATCH, "comm_s"): SECONDS,
    (*MICRO_BATCH, "weights_s"): SECONDS,
    (*MICRO_BATCH, "peak_bytes"): whole(0, MAX_BYTES),
    (*MICRO_BATCH, "methods"): ((None, *WORDS[0]), WORDS[1][:-1]),
    (*MICRO_BATCH, "recompute"): ((None, *FLAGS[0]), FLAGS[1][:-1]),
    (*MICRO_BATCH, "offload"): FLAGS,
    (*MICRO_BATCH, "tile_tokens"): whole(0, MAX_PACK_TOKENS),
    (*MICRO_BATCH, "head_groups"): whole(1, MAX_HEAD_GROUPS),
    (*MICRO_BATCH, "keep_attention"): FLAG,
    (*MICRO_BATCH, "placement"): (
        ([[]], [[[0, 9]]], [[[MAX_DEVICES - 1, MAX_PACK_TOKENS]]]),
        ({}, None, 7, [7], [[7]], [[[0]]], [[[0, 1, 2]]], [[[-1, 9]]], [[[MAX_DEVICES, 9]]], [[[0, 0]]], [[[0, 9.0]]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("keys", VALUES, ids=lambda keys: ".".join(map(str, keys)))
def test_a_value_is_taken_within_its_bounds_and_refused_by_name_outside_of_them(keys):
    good, bad = VALUES[keys]
    for value in good:
        check_plan_values(changed(keys, value))
    for value in bad:
        place = r"\[2\]" if type(value) is list and len(value) == 3 else r"\b"
        with pytest.raises(InputError, match=f"{keys[-1]}{place}"):
            check_plan_values(changed(keys, value))


ACTIVATIONS = {"offload", "tile_tokens", "head_groups", "keep_attention"}
OPTIONAL = {
    (): {"digest", "num_devices", "hidden_update_s"},
    SCHEME: {"shard_gradients", "zero_bubble", "slices", *ACTIVATIONS}, PIPELINE: set(),
    MICRO_BATCH: {"rows", "filler", "weights_s", "slices", "placement", *ACTIVATIONS},
}  # fmt: skip


@pytest.mark.parametrize("keys", OPTIONAL, ids=str)
def test_a_field_that_is_missing_or_unknown_is_named(keys):
    fields = plan = document()
    for key in keys:
        fields = fields[key]
    check_plan_values(plan)
    for name in fields.keys() - OPTIONAL[keys]:
        value = fields.pop(name)
        with pytest.raises(InputError, match=f"it has no '{name}'"):
            check_plan_values(plan)
        fields[name] = value
    names = ", ".join(sorted(fields.keys() | OPTIONAL[keys]))
    fields |= {"zeal": 1, "surprise": 1}
    with pytest.raises(InputError, match=f"unknown field 'surprise'; fields are {names}$"):
        check_plan_values(plan)


def test_what_may_be_left_out_may_be_left_out_and_the_place_of_a_wrong_value_is_told():
    plan = document()
    plan.pop("digest")
    first, second = plan["pipelines"][0]["micro_batches"]
    for name in ("rows", "filler"):
        first.pop(name, None)
        second[name] = 0
    first["lengths"] = [MAX_PACK_TOKENS]
    check_plan_values(plan)
    second["lengths"] = [9, 9, 0, 9, -1]
    said = f"pipelines[0].micro_batches[1].lengths[2] must be a whole number from 1 to {MOST_TOKENS:,}, not 0"
    with pytest.raises(InputError, match=f"^{re.escape(said)}$"):
        check_plan_values(plan)
    second["lengths"], plan["schemes"][1]["methods"] = [9], ["dense", "magic"]
    with pytest.raises(InputError, match=r"^schemes\[1\].methods\[1\] must be one of all_gather, .*, not 'magic'"):
        check_plan_values(plan)
    for value in ([], "plan", None):
        with pytest.raises(InputError, match="plan must be an object"):
            check_plan_values(value)
    with pytest.raises(InputError, match=r"^schemes must be a list, not {}$"):
        check_plan_values(changed(("schemes",), {}))


def test_a_micro_batch_of_more_tokens_than_any_computes_is_refused_with_what_makes_them():
    """Rows that are padded, of which there may be more than sequences, and the filler."""
    plan = document()
    plan["pipelines"][0]["micro_batches"][0] |= {"lengths": [5, 3], "ids": [0, 1]}
    micro_batch = plan["pipelines"][0]["micro_batches"][0]
    half = MAX_PACK_TOKENS // 2
    for padded_to, rows, filler, is_refused in (
        (half, 0, 0, False), (half, 0, 1, True), (half, 2, 0, False), (half, 3, 0, True), (half, 1, 1, True),
        (8, half, 0, True), (1, MAX_PACK_TOKENS, 0, False), (0, MAX_PACK_TOKENS + 1, 0, False),
        (0, 0, MAX_PACK_TOKENS - 8, False), (0, 0, MAX_PACK_TOKENS - 7, True),
    ):  # fmt: skip
        micro_batch |= {"padded_to": padded_to, "rows": rows, "filler": filler}
        if is_refused:
            with pytest.raises(InputError, match=f"padded_to={padded_to:,}, rows={rows:,} and filler={filler:,} make"):
                check_plan_values(plan)
        else:
            check_plan_values(plan)
