"""Plans by hand, profiles and options of the what-if commands that nobody can mean."""

import json

import pytest

from tests.cli.bad_inputs import Case, edit_json, few_of_each, no_document, setting, without, writing

RUN = ("data.index=GOOD/index", "data.sequences_per_step=4", "train.steps=3")
TRAIN = ("train", *RUN, "run_folder=GOOD/new", "--plan", "GOOD/plans.jsonl")
PLANS = "plans.jsonl"


def edit_plan(change, *, line: int = 1):
    """Change the plan on a line by hand: without its digest."""

    def spoil(folder):
        path = folder / PLANS
        lines = path.read_text().splitlines()
        document = json.loads(lines[line])
        document.pop("digest")
        change(document)
        lines[line] = json.dumps(document)
        path.write_text("\n".join(lines) + "\n")

    return spoil


NAN, INFINITY = float("nan"), float("inf")
MICRO_BATCH = ("pipelines", 0, "micro_batches", 0)
PLAN_VALUES = {
    ("lr_factor",): (NAN, INFINITY, -INFINITY, -1, 0, 1e300, "1", True, None, [], 10**400),
    ("step",): (-1, 1.0, "1", True, None),
    ("loss_normaliser",): (0, -1, 1.5, "9"),
    ("update_s",): (NAN, -1, "1", 1e300),
    ("time_s",): (NAN, -1, True),
    ("policy",): (7, None, "x" * 1000, "a\x1b[31m"),
    ("schemes", 0, "degree"): (0, 1.0, "1", 10**9),
    ("schemes", 0, "stage_layers"): ([], [0], [4.0], "4", [10**9]),
    ("schemes", 0, "methods"): (["<script>"] * 4, [], "dense", [1] * 4),
    ("schemes", 0, "recompute"): ([0], [2] * 4, ["0"] * 4),
    ("schemes", 0, "weights"): ("half", None, []),
    ("pipelines", 0, "ranks"): ([], [1], [0.0], [True], [-1], "0", [0, 0]),
    ("pipelines", 0, "phase"): (1, -1, "0"),
    ("pipelines", 0, "scheme"): (-1, 1, "0"),
    ("pipelines", 0, "state_bytes"): (-1, 1.5, 10**30),
    (*MICRO_BATCH, "ids"): ([], [-1], ["0"], [0.5], [True], [10**30]),
    (*MICRO_BATCH, "lengths"): ([], [0], [-5], [10**18], [2.0]),
    (*MICRO_BATCH, "padded_to"): (10**13, -1, 1.5, "8"),
    (*MICRO_BATCH, "filler"): (10**12, -1, 0.5, True),
    (*MICRO_BATCH, "rows"): (10**9, -1, 1.5),
    (*MICRO_BATCH, "methods"): (["dense"], "dense", ["magic"] * 4),
    (*MICRO_BATCH, "peak_bytes"): (-1, 0.5, "1"),
}
PROFILE_VALUES = {
    ("rows", 0, "time_s"): (0, -1, NAN, INFINITY, "1", True, None, 1e300),
    ("rows", 0, "spread_s"): (-1, NAN, "1"),
    ("rows", 0, "kept_bytes"): (-1, 0, 1.5, NAN, 10**30),
    ("rows", 0, "lengths"): ([], [0], [-1], [1.5], "32", 7, [10**18]),
    ("rows",): ([], None, "x", [1], {}),
    ("update_s",): (-1, NAN, INFINITY, "1"),
    ("num_ranks",): (0, -1, 1.5, 10**9),
    ("recompute",): ("yes", 1, None),
    ("dtype",): ("float16", 7, None),
    ("device",): ("NVIDIA H100 80GB HBM3", 7, ""),
    ("model_digest",): ("0" * 16, None),
    ("schema_version",): (None, 99, "1", 10**30),
    ("surprise",): (1,),
}
COMPARE = ("compare", "--lengths", "GOOD/lengths.npy", "--model", "llama-7b", "--device", "A100-80GB", "--gpus", "8")
OPTIONS = {
    "--gpus": ("0", "-1", "1000000000", "abc", "8,,64", "", "8.5", "٨", "²", "8,", "1e3", "9" * 5000, "1," * 50 + "1"),
    "--model": ("lama-7b", "", "../x", "a\x1b[0m", "x" * 10_000, "[bold]"),
    "--device": ("H100", "", "cuda", "[/b]"),
    "--lengths": ("nowhere.npy", "", "commoncraw", "/dev/zero", "x" * 5000, "[/b]", "GOOD/config.yaml", "GOOD"),
    "--policies": ("fast", "", "static,,auto", "[/]"),
    "--methods": ("magic", "", "dense,"),
    "--hbm": ("0", "-1", "nan", "inf", "abc", "1e300"),
    "--max-degree": ("0", "-1", "1000000000", "x"),
    "--max-stages": ("0", "1000000000"),
    "--devices-per-node": ("0", "-1", "1000000000"),
    "--max-length": ("0", "-5", "1000000000000000000"),
    "--tokens-per-step": ("0", "1000000000000000000"),
    "--steps": ("0", "1000000000"),
    "--seed": ("-1", "1" * 30),
    "--dtype": ("float16", ""),
    "--html": ("GOOD/nowhere/page.html", "GOOD", "/proc/page.html", "/dev/null/page.html"),
}
MEMORY = ("memory", "--model", "llama-7b", "--device", "A100-80GB")
SIMULATE = ("simulate", "GOOD/plans.jsonl")


def _cases() -> list[Case]:
    cases = [
        Case(
            name=f"plan: {keys[-1]}={str(value)[:20]}",
            arguments=TRAIN,
            words=("plans.jsonl:2",),
            spoil=edit_plan(setting(*keys, to=value)),
        )
        for keys, values in PLAN_VALUES.items()
        for value in values
    ]
    cases += [
        Case(name=f"plan: no {keys[-1]}", arguments=TRAIN, words=("plans.jsonl:2",), spoil=edit_plan(without(*keys)))
        for keys in PLAN_VALUES
        if keys[-1] not in ("filler", "rows")
    ]
    cases += [
        Case(name=f"plans: {name}", arguments=TRAIN, words=("plans.jsonl", word), spoil=spoil)
        for name, (spoil, word) in no_document(PLANS).items()
    ]
    cases += [
        Case(
            name="plan: other ids",
            arguments=TRAIN,
            words=("step 2 loses",),
            code=4,
            spoil=edit_plan(setting(*MICRO_BATCH, "ids", 0, to=10**6), line=2),
        ),
        Case(
            name="plan: other normaliser",
            arguments=TRAIN,
            words=("divides the loss",),
            code=4,
            spoil=edit_plan(setting("loss_normaliser", to=10**6), line=2),
        ),
        Case(
            name="plan: unknown field",
            arguments=TRAIN,
            words=("unknown field 'lr_facter'",),
            spoil=edit_plan(setting("lr_facter", to=2)),
        ),
        Case(name="plans: too few", arguments=(*TRAIN, "train.steps=9"), words=("no plan for step 3",)),
        Case(
            name="simulate: NaN", arguments=SIMULATE, words=("plans.jsonl",), spoil=edit_plan(setting("time_s", to=NAN))
        ),
        Case(
            name="simulate: negative",
            arguments=SIMULATE,
            words=("step 1",),
            spoil=edit_plan(setting("update_s", to=-1)),
        ),
        Case(name="simulate: list", arguments=SIMULATE, words=("plans.jsonl:1",), spoil=writing(PLANS, "[1]\n")),
    ]
    for flag, value in (
        ("--jitter", "nan"),
        ("--jitter", "-1"),
        ("--jitter", "inf"),
        ("--jitter", "1e300"),
        ("--straggler", "0:1e300"),
        ("--straggler", "x"),
        ("--straggler", "0:nan"),
        ("--straggler", "-1:2"),
        ("--straggler", "0:0.5"),
        ("--steps", "0"),
        ("--trace", "GOOD/nowhere/t.json.gz"),
        ("--html", "GOOD"),
    ):
        cases.append(Case(name=f"simulate {flag} {value}", arguments=(*SIMULATE, flag, value), words=("rror",)))
    profiled = ("plan", *RUN, "cluster.name=1xcpu", "plan.profile=GOOD/profile.json")
    cases += [
        Case(
            name=f"profile: {keys[-1]}={str(value)[:20]}",
            arguments=profiled,
            words=("profile",),
            spoil=edit_json("profile.json", setting(*keys, to=value)),
        )
        for keys, values in PROFILE_VALUES.items()
        for value in values
    ]
    cases += [
        Case(
            name=f"profile: no {keys[-1]}",
            arguments=profiled,
            words=("profile",),
            spoil=edit_json("profile.json", without(*keys)),
        )
        for keys in PROFILE_VALUES
        if keys[-1] != "surprise"
    ]
    cases += [
        Case(name=f"profile: {name}", arguments=profiled, words=("profile", word), spoil=spoil)
        for name, (spoil, word) in no_document("profile.json").items()
    ]
    cases += [
        Case(
            name=f"compare {option} {value[:20]}",
            arguments=(*COMPARE, option, value),
            words=(option.strip("-") if option != "--html" else "",),
        )
        for option, values in OPTIONS.items()
        for value in values
    ]
    for option in ("--model", "--device", "--hbm", "--max-degree", "--methods", "--devices-per-node"):
        cases += [
            Case(name=f"memory {option} {value[:20]}", arguments=(*MEMORY, option, value), words=("rror",))
            for value in OPTIONS[option]
        ]
    cases += [
        Case(name=f"memory --gpus {value[:9]}", arguments=(*MEMORY, "--gpus", value), words=("gpus",))
        for value in ("0", "1000000000", "x")
    ]
    cases += [
        Case(name=f"cluster {name[:20]}", arguments=("plan", *RUN, f"cluster.name={name}"), words=("cluster",))
        for name in (
            "1000000000xcpu",
            "٨xcpu",
            "0xcpu",
            "xcpu",
            "1x1x1xcpu",
            "8xA100",
            "99999999x99999999xcpu",
            "²xcpu",
        )
    ]
    return cases


CASES = _cases()


@pytest.mark.parametrize("case", few_of_each(CASES), ids=[f"{k}-{case.name[:40]!a}" for k, case in enumerate(CASES)])
def test_a_plan_a_profile_or_an_option_that_cannot_be_meant_is_refused(case, refuse):
    refuse(case)
