"""Plans from disk are the plans that were written, for the batch they were made for, and nothing else is executed."""

import copy
import gc
import json
import tracemalloc

import numpy as np
import pytest

from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.sampler import Sampler
from lengthwise.plan.plan_file import PlanFile
from lengthwise.plan.planner import Planner
from tests.plan.costs import make_problem

CORPUS = LengthIndex(lengths=np.arange(1, 91))
STATIC = Planner(policy="static", problem=make_problem(num_devices=2, degrees=[1], stages=[1]))
NUM_STEPS = 6


def batches(seed=3):
    sampler = Sampler(CORPUS, seed=seed, tokens_per_step=200)
    return [next(sampler) for _ in range(NUM_STEPS)]


PLANS = [STATIC(batch) for batch in batches()]
DOCUMENTS = [plan.to_json() for plan in PLANS]
LINES = [json.dumps(document) + "\n" for document in DOCUMENTS]


def without_digest(document):
    return {name: value for name, value in document.items() if name != "digest"}


@pytest.fixture
def write(tmp_path):
    def write_plans(text):
        path = tmp_path / "plans.jsonl"
        path.write_text(text)
        return path

    return write_plans


FORMS = {
    "JSON lines": "".join(LINES),
    "blank lines between": "\n".join(LINES) + "\n\n",
    "no end of the last line": "".join(LINES)[:-1],
    "any order": "".join(reversed(LINES)),
    "keys in any order": "".join(json.dumps(dict(reversed(document.items()))) + "\n" for document in DOCUMENTS),
    "what plan --json prints": json.dumps({"plans": DOCUMENTS, "out": None}, indent=1),
    "that on one line": json.dumps({"plans": DOCUMENTS}) + "\n",
    "a list": json.dumps(DOCUMENTS, indent=2),
    "by hand, without digests": json.dumps([without_digest(document) for document in DOCUMENTS]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_plans_that_were_written(write, form):
    plans = PlanFile(write(FORMS[form]))
    assert len(plans) == NUM_STEPS
    plans.check_steps(range(NUM_STEPS))
    for batch, plan in reversed(list(zip(batches(), PLANS))):
        found = plans(batch)
        assert found == plan and found.digest == plan.digest


def test_one_plan_may_be_written_over_many_lines(write):
    assert PlanFile(write(json.dumps(without_digest(DOCUMENTS[0]), indent=2))).plan(0) == PLANS[0]


def test_of_a_step_planned_twice_the_last_plan_counts(write):
    other = {**without_digest(DOCUMENTS[1]), "lr_factor": 0.5}
    plans = PlanFile(write("".join(LINES) + json.dumps(other) + "\n"))
    assert len(plans) == NUM_STEPS
    assert plans.plan(1).lr_factor == 0.5
    assert plans.plan(2) == PLANS[2]


def test_a_step_that_the_file_lacks_is_named_with_how_many_plans_there_are(write):
    plans = PlanFile(write("".join(LINES)))
    plans.check_steps(range(2, NUM_STEPS))
    with pytest.raises(
        InputError, match=r"no plan for step 6: it has 6 plans, .* steps 0 to 9\. .* --steps 10, or set"
    ):
        plans.check_steps(range(10))
    with pytest.raises(InputError, match="no plan for step 6"):
        plans.plan(6)
    missing_first = PlanFile(write("".join(LINES[1:])))
    with pytest.raises(InputError, match="no plan for step 0: it has 5 plans") as refused:
        missing_first.check_steps(range(3))
    assert "train.steps" not in str(refused.value)  # no number of steps would do


@pytest.mark.parametrize("cut", [1, 40, len(LINES[-1]) - 2])
def test_a_last_line_that_is_cut_off_is_no_plan(write, cut):
    plans = PlanFile(write("".join(LINES)[: -1 - cut]))
    plans.check_steps(range(NUM_STEPS - 1))
    with pytest.raises(InputError, match="no plan for step 5: it has 5 plans and a last line that is cut off"):
        plans.check_steps(range(NUM_STEPS))


def test_plans_of_other_batches_are_refused_with_what_differs(write):
    plans = PlanFile(write("".join(LINES)))
    with pytest.raises(CheckError) as refused:
        plans(batches(seed=4)[2])
    for part in ("plans.jsonl was made for other batches", "step 2 loses [(", "adds [(", "seed", "plan again"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no plans in"),
        ("\n\n", "no plans in"),
        ('{"plans": []}', "no plans in"),
        ("name: run\n", "neither JSON lines"),
        (LINES[0][:50], "neither JSON lines"),
        ("[1, 2]", "a plan is an object with a step, not 1"),
        (LINES[0] + '{"policy": "static"}\n', r'plans.jsonl:2 is not a plan: it has no "step"'),
    ],
    ids=["nothing", "blank", "no plans", "YAML", "cut off", "numbers", "no step"],
)
def test_what_holds_no_plans_is_refused_at_once(write, text, message):
    with pytest.raises(InputError, match=message):
        PlanFile(write(text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read plans from .*nowhere: No such file"):
        PlanFile(tmp_path / "nowhere")


def edited(**changes):
    return {**without_digest(DOCUMENTS[1]), **changes}


def with_micro_batch(**changes):
    """The plan for step 1 by hand, with another first micro-batch."""
    document = copy.deepcopy(edited())
    document["pipelines"][0]["micro_batches"][0] |= changes
    return document


def with_scheme(**changes):
    document = copy.deepcopy(edited())
    document["schemes"][0] |= changes
    return document


def with_pipeline(**changes):
    document = copy.deepcopy(edited())
    document["pipelines"][0] |= changes
    return document


NAN, INFINITY = float("nan"), float("inf")
WRONG_VALUES = {
    "lr_factor must be a number above 0": [edited(lr_factor=value) for value in (-1, 0, 1e300, "2", True, None, [1])],
    "NaN is not a number of JSON": [edited(lr_factor=NAN), edited(time_s=NAN), with_micro_batch(time_s=NAN)],
    "Infinity is not a number of JSON": [edited(lr_factor=INFINITY), with_micro_batch(comm_s=INFINITY)],
    "step must be a whole number": [edited(step=value) for value in (1.0, "1", True, -1, None, 10**30)],
    "policy must be the name": [edited(policy=value) for value in (3, "a\nb", "x" * 200)],
    "loss_normaliser must be a whole number": [edited(loss_normaliser=value) for value in (0, -5, 1.5, "7", 10**400)],
    "time_s must be a number of seconds": [edited(time_s=value) for value in (-1.0, "1", True, 10**400)],
    "unknown field 'lr_facter'": [edited(lr_facter=1)],
    "schemes is empty": [edited(schemes=[])],
    r"schemes\[0\] must be an object": [edited(schemes=["dense"])],
    r"schemes\[0\].degree must be a whole number": [with_scheme(degree=value) for value in (0, True, 1.0, 10**9)],
    r"schemes\[0\].stage_layers": [with_scheme(stage_layers=value) for value in ([], [4.0], 4, [10**12], "4")],
    r"schemes\[0\].methods\[0\] must be one of": [with_scheme(methods=["magic"] * 4), with_scheme(methods=[[]] * 4)],
    r"schemes\[0\].recompute\[0\] must be 0 or 1": [with_scheme(recompute=[2, 0, 0, 0]), with_scheme(recompute=["0"])],
    r"schemes\[0\].weights must be one of": [with_scheme(weights=value) for value in ("half", ["whole"], None)],
    "pipelines must be a list": [edited(pipelines=7), edited(pipelines={})],
    r"pipelines\[0\].ranks": [with_pipeline(ranks=value) for value in ([0.0], [-1], [True], [], "0", [10**9])],
    r"pipelines\[0\].scheme must be a whole number": [with_pipeline(scheme=value) for value in (-1, 5, "0", 0.0)],
    r"pipelines\[0\].phase must be": [with_pipeline(phase=value) for value in (-1, "0", 10**12)],
    r"micro_batches\[0\].ids": [with_micro_batch(ids=value) for value in ([1.0], ["1"], [True], [-1], [], [2**63])],
    r"micro_batches\[0\].lengths": [with_micro_batch(lengths=value) for value in ([0], [-3], [2.0], 4, [10**18])],
    r"micro_batches\[0\].*over the limit": [with_micro_batch(filler=10**12), with_micro_batch(padded_to=10**9, rows=9)],
    r"micro_batches\[0\].padded_to must be": [with_micro_batch(padded_to=value) for value in (-1, 1.0, True, 10**30)],
    r"micro_batches\[0\].peak_bytes must be": [with_micro_batch(peak_bytes=value) for value in (-1, 1.5, 10**40)],
    "plan schema 1, this version reads": [edited(schema_version=1)],
}
CASES = [(words, document) for words, documents in WRONG_VALUES.items() for document in documents]


@pytest.mark.parametrize(("words", "document"), CASES, ids=[f"{k}-{words[:30]}" for k, (words, _) in enumerate(CASES)])
def test_a_wrong_value_anywhere_is_refused_by_line_and_field_when_the_file_is_opened(write, words, document):
    path = write("".join(LINES[:1]) + json.dumps(document) + "\n" + "".join(LINES[2:]))
    with pytest.raises(InputError, match=rf"plans\.jsonl:2.*{words}"):
        PlanFile(path)


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        (LINES[1][:-30] + "\n", InputError, "plans.jsonl:2 is damaged"),
        ("[" * 100_000 + "\n", InputError, "plans.jsonl:2 is damaged: .* nests"),
        ('{"step": ' + "9" * 5000 + "}\n", InputError, "plans.jsonl:2 is damaged"),
        (json.dumps({**DOCUMENTS[1], "lr_factor": 2.0}) + "\n", CheckError, ":2, step 1: .* changed after it"),
        ("\x00\n", InputError, "plans.jsonl:2 is damaged"),
        ("7\n", InputError, "plans.jsonl:2: a plan is an object, not 7"),
    ],
    ids=["cut in the middle", "deep", "5,000 digits", "edited with its digest", "NUL", "a number"],
)
def test_a_damaged_line_is_refused_when_the_file_is_opened(write, line, error, message):
    with pytest.raises(error, match=message):
        PlanFile(write(LINES[0] + line + "".join(LINES[2:])))


def test_all_batches_of_a_run_are_compared_before_its_first_step(write):
    PlanFile(write("".join(LINES))).check_batches(iter(batches()), NUM_STEPS)
    other = [*batches()[:4], batches(seed=4)[4]]
    with pytest.raises(CheckError, match="step 4 loses"):
        PlanFile(write("".join(LINES))).check_batches(iter(other), 5)


def test_every_scheme_and_number_of_ranks_of_a_file_is_in_a_representative_plan(write):
    wider = Planner(policy="static", problem=make_problem(num_devices=4, degrees=[2], stages=[1]))(batches()[3])
    plans = PlanFile(write("".join([*LINES[:3], json.dumps(wider.to_json()) + "\n", *LINES[4:]])))
    few = list(plans.representatives())
    assert {plan.num_devices for plan in few} == {2, 4} and len(few) < NUM_STEPS
    assert {pipeline.scheme for plan in few for pipeline in plan.pipelines} == set(plans.largest)


def test_a_file_that_is_written_anew_while_it_is_used_is_noticed(write):
    plans = PlanFile(write("".join(LINES)))
    write("".join(reversed(LINES)))
    with pytest.raises(InputError, match=r"plans\.jsonl has changed|plans\.jsonl:\S+ the plan for step"):
        for step in range(NUM_STEPS):
            plans.plan(step)


def test_many_plans_are_not_held_in_memory(write, tmp_path):
    body = json.dumps(without_digest(DOCUMENTS[0])).split('"step": 0', 1)
    count = 500
    path = write("".join(f'{body[0]}"step": {step}{body[1]}\n' for step in range(count)))
    tracemalloc.start()
    plans = PlanFile(path)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plans) == count
    assert held < path.stat().st_size / 4
