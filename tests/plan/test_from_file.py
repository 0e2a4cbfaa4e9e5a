"""Plans from disk are the plans that were written, for the batch they were made for, and nothing else is executed."""

import json
import tracemalloc

import numpy as np
import pytest

from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.sampler import Sampler
from lengthwise.plan.from_file import PlanFile
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


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        (LINES[1][:-30] + "\n", InputError, "plans.jsonl:2, the plan for step 1, is damaged"),
        (json.dumps({**DOCUMENTS[1], "lr_factor": 2.0}) + "\n", CheckError, "plans.jsonl:2: .* changed after it was"),
        (json.dumps(edited(schema_version=1)) + "\n", InputError, "plans.jsonl:2: plan schema 1, this version reads"),
        (json.dumps(edited(pipelines=7)) + "\n", InputError, "plans.jsonl:2: not a plan: TypeError"),
        (json.dumps(edited(schemes=["dense"])) + "\n", InputError, "plans.jsonl:2: not a plan: TypeError"),
        (
            json.dumps(edited(schemes=[{**DOCUMENTS[1]["schemes"][0], "methods": ["magic"] * 4}])) + "\n",
            InputError,
            "plans.jsonl:2 is not a plan: 'magic' is not a valid Method",
        ),
    ],
    ids=["cut in the middle", "edited with its digest", "older schema", "wrong kind", "wrong scheme", "unknown method"],
)
def test_a_damaged_plan_is_refused_by_line_and_the_others_stay_usable(write, line, error, message):
    plans = PlanFile(write(LINES[0] + line + "".join(LINES[2:])))
    assert plans.plan(0) == PLANS[0] and plans.plan(2) == PLANS[2]
    with pytest.raises(error, match=message):
        plans.plan(1)


def test_a_file_that_is_written_anew_while_it_is_used_is_noticed(write):
    plans = PlanFile(write("".join(LINES)))
    write("".join(reversed(LINES)))
    with pytest.raises(InputError, match=r"plans\.jsonl has changed|plans\.jsonl:\S+ the plan for step"):
        for step in range(NUM_STEPS):
            plans.plan(step)


def test_many_plans_are_not_held_in_memory(write, tmp_path):
    body = LINES[0].split('"step": 0', 1)
    count = 5_000
    path = write("".join(f'{body[0]}"step": {step}{body[1]}' for step in range(count)))
    tracemalloc.start()
    plans = PlanFile(path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plans) == count
    assert held < path.stat().st_size / 4
