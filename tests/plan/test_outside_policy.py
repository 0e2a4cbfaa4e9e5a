"""Policies of other packages: found by name, planned with, and refused where their plans are wrong."""

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

import lengthwise
from lengthwise.config.prepare_options import read_options
from lengthwise.config.run_config import check, load
from lengthwise.core import plugins
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.plan.outside_policy import policy_digest
from lengthwise.plan.planner import Planner
from lengthwise.plan.prefetch import PlanAhead
from tests.plan.costs import SimpleCost, make_batch, make_problem

SOURCE = """
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft
from lengthwise.plan.uniform.static import prepare as static

def one_by_one(problem):
    candidate = next(c for c in problem.candidates if c.num_devices == 1)
    def plan(priced):
        packs = [tuple((number,) for number in range(rank, len(priced.lengths), problem.num_devices))
                 for rank in range(problem.num_devices)]
        return [[PipelineDraft(candidate=candidate, ranks=(rank,), packs=pack) for rank, pack in enumerate(packs)]]
    return plan

class Static:
    def __init__(self, problem):
        self.inner, self.name = static(problem), "as static does"
    def __call__(self, priced):
        return self.inner(priced)

def changed(change):
    def prepare(problem):
        inner = one_by_one(problem)
        return lambda priced: change(inner(priced)[0])
    return prepare

def without_last(phase):
    return [[*phase[:-1], PipelineDraft(candidate=phase[-1].candidate, ranks=phase[-1].ranks)]]

def twice(phase):
    return [[*phase[:-1], PipelineDraft(candidate=phase[-1].candidate, ranks=phase[-1].ranks, packs=phase[0].packs)]]

def one_pack(phase):
    whole = tuple(number for pipeline in phase for pack in pipeline.packs for number in pack)
    rest = [PipelineDraft(candidate=p.candidate, ranks=p.ranks) for p in phase[1:]]
    return [[PipelineDraft(candidate=phase[0].candidate, ranks=phase[0].ranks, packs=(whole,)), *rest]]

def raises(phase):
    raise RuntimeError("no plan today")

loses, doubles, overflows, fails = map(changed, (without_last, twice, one_pack, raises))
lacks_a_rank = changed(lambda phase: [phase[:-1]])
shares_a_rank = changed(lambda phase: [[*phase[:-1], PipelineDraft(candidate=phase[0].candidate, ranks=(0,))]])
bounds_too_high = changed(lambda phase: DraftPlan(phases=(tuple(phase),), lower_bound_s=1e9))
returns_nothing = changed(lambda phase: None)

def prepares_nothing(problem):
    return None

constant = 3
"""
WRONG = {
    "loses": (InputError, r"plans step 5 wrongly: .*loses"),
    "doubles": (InputError, "plans step 5 wrongly: .*adds"),
    "overflows": (InfeasibleError, "plans step 5 wrongly: .*a micro-batch of 4 sequences"),
    "fails": (InputError, "plans step 5 wrongly: RuntimeError: no plan today"),
    "lacks_a_rank": (InputError, r"its pipelines have ranks \[0\], and there are 2"),
    "shares_a_rank": (InputError, r"its pipelines have ranks \[0, 0\], and there are 2"),
    "bounds_too_high": (InputError, "the bound .* exceeds the plan"),
    "returns_nothing": (InputError, "plans step 5 wrongly: TypeError"),
    "prepares_nothing": (InputError, "cannot be prepared: TypeError: .*returns None"),
    "constant": (InputError, r"policy outside:constant: it is a int, not a function f\(problem\)"),
    "one_by": (InputError, "has no 'one_by'; did you mean one_by_one"),
}
LENGTHS = (90, 40, 30, 20)


@pytest.fixture(autouse=True)
def outside(tmp_path, monkeypatch):
    """The module ``outside`` in the current folder."""
    (tmp_path / "outside.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("outside", None)


def planner_of(policy):
    return Planner(
        policy=policy, problem=make_problem(SimpleCost(capacity=100), num_devices=2, samples=[LENGTHS], recomputed=(0,))
    )


def test_a_function_and_a_class_plan_every_sequence_once():
    batch = make_batch(LENGTHS, step=5)
    plan = planner_of("outside:one_by_one")(batch)
    assert [[m.pack.ids for m in pipeline.micro_batches] for pipeline in plan.pipelines] == [
        [(10,), (12,)],
        [(11,), (13,)],
    ]
    assert plan.policy == "outside:one_by_one" and plan.digest == planner_of("outside:one_by_one")(batch).digest
    static, wrapped = planner_of("static")(batch), planner_of("outside:Static")(batch)
    assert wrapped.pipelines == static.pipelines and wrapped.lower_bound_s == static.lower_bound_s


@pytest.mark.parametrize("function", WRONG)
def test_a_wrong_policy_is_refused_and_never_replaced(function):
    kind, message = WRONG[function]
    with pytest.raises(kind, match=f"policy outside:{function}"):
        planner_of(f"outside:{function}")(make_batch(LENGTHS, step=5))
    stream = type("Stream", (), {"__next__": lambda self: make_batch(LENGTHS, step=5), "state_dict": lambda self: {}})()
    ahead = PlanAhead(stream, planner_of(f"outside:{function}"), fallback=planner_of("static"), workers=0)
    with pytest.raises(kind, match=message):
        ahead(next(ahead))


def test_entry_points_are_policies_by_name(monkeypatch):
    entry = EntryPoint(name="mine", value="outside:one_by_one", group=plugins.POLICIES)
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints((entry,)).select(group=group))
    assert planner_of("mine")(make_batch(LENGTHS)).policy == "mine"
    assert check({"plan": {"policy": "mine"}}).plan.policy == "mine" and policy_digest("mine")
    with pytest.raises(InputError, match=r"plan\.policy: input should be 'padded', .*, 'mine' or MODULE:FUNCTION"):
        load(None, ["plan.policy=yours"])


def test_commands_and_functions_take_them():
    options = {"model": "llama-tiny", "cluster": "2xH100-80GB", "tokens_per_step": 1000}
    (plan,) = lengthwise.plan(LENGTHS, policy="outside:one_by_one", steps=1, **options)
    assert plan.policy == "outside:one_by_one"
    results = lengthwise.compare(LENGTHS, policies=["static", "outside:one_by_one"], steps=1, **options)
    assert {result.policy for result in results.clusters[0].ranked} == {"static", "outside:one_by_one"}
    with pytest.raises(InputError, match="policy outside:nothing"):
        lengthwise.compare(LENGTHS, policies=["outside:nothing"], steps=1, **options)
    assert read_options({"policy": "outside:one_by_one"}).policy == "outside:one_by_one"


def test_code_that_a_file_names_runs_only_where_the_command_line_names_it_too(tmp_path):
    (tmp_path / "run.yaml").write_text("plan: {policy: 'outside:one_by_one'}\n")
    with pytest.raises(InputError, match=r"run\.yaml: plan\.policy=outside:one_by_one is code that a file names"):
        load(tmp_path / "run.yaml", [])
    assert load(tmp_path / "run.yaml", ["plan.policy=outside:one_by_one"]).plan.policy == "outside:one_by_one"


def test_ranks_compare_the_source_of_a_policy(tmp_path):
    before = policy_digest("outside:one_by_one")
    assert policy_digest("auto") == "" and len(before) == 16
    (tmp_path / "outside.py").write_text(SOURCE + "\n")
    assert policy_digest("outside:one_by_one") != before
