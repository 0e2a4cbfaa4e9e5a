"""Configurations and overrides that nobody should train with: refused by `config`, `plan` and `train` alike."""

import pytest

from tests.cli.bad_inputs import Case, few_of_each, no_document, writing

FILE = "config.yaml"
OVERRIDES = {
    "optim.lr": (".inf", ".nan", "-1", "0", "1.0e+300", "true", "[1]", "{a: 1}", "1e999"),
    "optim.betas": ("[2, -1]", "[0.9]", "[0.9, 0.9, 0.9]", "0.9", "[.nan, 0.9]", "[true, false]", "[1.0, 0.5]"),
    "optim.eps": (".inf", "0", "-1e-8", ".nan", "5"),
    "optim.momentum": ("1", "-0.1", ".nan"),
    "optim.weight_decay": (".inf", "-1", "1e9"),
    "optim.clip_norm": (".nan", "-.inf", "-1"),
    "optim.loss_scale": ("0", "-1", "1e30", "true"),
    "optim.loss_scale_window": ("0",),
    "optim.gradient_dtype": ("float16",),
    "optim.lr_clamp": ("[4, 0.25]", "[-1, 1]", "[0, .inf]", "[0, 0]", "[1]", "3"),
    "optim.lr_reference": ("0", "0.001", ".inf", "-5"),
    "optim.min_lr_fraction": ("1.5", "-0.1", ".nan"),
    "optim.warmup_steps": ("-1", "1000000000000", "1.5"),
    "optim.lr ": ("1",),
    "train.steps": ("1:30", "0", "-3", "1000000000000", "1.5", "true", "yes", "1e3x", "9" * 5000, "٣", "{}"),
    "train.checkpoint_every": ("-1", "99999999999999", "0.5"),
    "train.keep_checkpoints": ("0", "1.5", "[]"),
    "train.log_every": ("0", "-1"),
    "train.compile": ("maybe", "7", "[true]"),
    "train.dtype": ("float8", "int8", "0"),
    "train.device": ("tpu", "cuda:0", ""),
    "plan.policy": ("aut", "", "Auto ", "[auto]"),
    "plan.look_ahead": ("1000000000", "0"),
    "plan.workers": ("-1", "1000000"),
    "plan.max_degree": ("1000000000", "0", "2.5"),
    "plan.max_stages": ("1000000000", "0"),
    "plan.degree": ("0", "-2", "1000000000"),
    "plan.shapes": ("0", "1000000000"),
    "plan.max_tokens": ("0", "1000000000000000"),
    "plan.batch_size": ("0", "100000000000000"),
    "plan.objective": ("fast",),
    "data.max_length": ("0", "-7", "1000000000000000", "abc"),
    "data.tokens_per_step": ("0", "1.0e+30", "999999999999999999"),
    "data.sequences_per_step": ("0", "1000000000000"),
    "data.window": ("0", "1000000000000"),
    "data.prefetch": ("-1", "1000000000"),
    "data.pacing_start": ("0", "2", ".nan"),
    "data.pacing_stages": ("0", "1000000000"),
    "data.over_length": ("cut",),
    "data.mixture": (
        "[{index: a, repeat: .inf}]",
        "[{index: a, repeat: -1}]",
        "[{index: a, repeat: 1.0e+300}]",
        "[{repeat: 1}]",
        "[{index: a, share: .nan}]",
        "[{index: a, share: 0}]",
        "[{index: a, shar: 1}]",
        "7",
        "[3]",
        "a",
    ),
    "model.vocab_size": ("0", "1000000000000"),
    "cluster.memory_gib": ("0", "-1", ".inf", ".nan", "1.0e+300"),
    "seed": ("-1", "99999999999999999999", "1.5", "true"),
    "name": ("..", "../evil", ".hidden", "a/b", "x" * 101, '"a\\nb"', '"a\\0b"', "", "a b", "[x]"),
    "run_folder": ('"a\\0b"', '"\\ud800"', "x" * 5000, '"a\\e[31mb"', "[a]"),
    "data.index": ('"\\0"',),
}
UNKNOWN = {
    "optim.lrr=1": "did you mean optim.lr?",
    "trainn.steps=1": "did you mean train?",
    "data=7": "data",
    "train.steps.more=1": "train.steps",
    "=1": "is not key=value",
    "..=1": "unknown key",
    "name": "no configuration at name",
    "a=*x": "unknown key",
    "a=&x 1": "unknown key",
    "a=!!python/object:os.system x": "tag",
    "name={{{{{{{{{{{{{{{{{{{{": "nested",
    "train={steps: 1, steps: 2}": "again on line",
}
FILES = {
    "a list": ("- 1\n- 2\n", "not a list"),
    "a word": ("hello\n", "not a str"),
    "a number": ("7\n", "not a int"),
    "two documents": ("name: a\n---\nname: b\n", "not YAML"),
    "a tab": ("train:\n\tsteps: 1\n", "line 2"),
    "a key twice": ("name: a\nseed: 1\nname: b\n", "'name' is on line 1 and again on line 3"),
    "a nested key twice": ("train:\n  steps: 1\n  steps: 2\n", "on line 2 and again on line 3"),
    "an alias": ("a: &x 1\nb: *x\n", "line 2, column 4: the alias *x"),
    "a billion laughs": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefg", "bcdefgh")),
        "alias",
    ),
    "itself": ("a: &a [*a]\n", "alias"),
    "a tag": ("name: !!python/object/apply:os.system [ls]\n", "the tag"),
    "a binary tag": ("name: !!binary aGVsbG8=\n", "the tag"),
    "a bad float tag": ("seed: !!float abc\n", "the tag"),
    "a merge": ("<<: {name: a}\nname: b\n", ""),
    "a list as key": ("? [a, b]\n: 1\n", "key is not text"),
    "a number as key": ("1: 2\n", "1"),
    "many digits": ("seed: " + "9" * 5000 + "\n", "line 1"),
    "hexadecimal of nothing": ("seed: 0x_\n", "line 1"),
    "infinity": ("optim: {lr: .inf}\n", "optim.lr: input should be a finite number"),
    "two mistakes": ("optim: {lr: .inf}\ntrain: {steps: 0}\n", "2 errors"),
    "a date": ("seed: 2024-01-01\n", "seed: "),
    "cut off": ("train: {steps: 1", "not YAML"),
    "a quote left open": ('name: "abc\n', "not YAML"),
    "a control character": ("name: a\x07b\n", "not allow"),
    "half a surrogate": ('name: "\\ud800"\n', "control characters"),
    "a section as value": ("train: 7\n", "train"),
    "a value as section": ("seed: {a: 1}\n", "seed"),
    "null everywhere": ("seed: ~\nname: ~\n", "2 errors"),
    "keys of another program": ("learning_rate: 1\nbatch_size: 2\n", "2 errors"),
}


def _cases() -> list[Case]:
    cases = [
        Case(name=f"{key}={value[:30]}", arguments=("config", f"{key}={value}"), words=("error:", key.split(".")[-1]))
        for key, values in OVERRIDES.items()
        for value in values
    ]
    cases += [Case(name=word, arguments=("config", word), words=(expected,)) for word, expected in UNKNOWN.items()]
    cases += [
        Case(name=name, arguments=("config", FILE), words=(FILE, word), spoil=writing(FILE, text))
        for name, (text, word) in FILES.items()
    ]
    cases += [
        Case(name=f"{name} as file", arguments=("config", FILE), words=(FILE, word), spoil=spoil)
        for name, (spoil, word) in no_document(FILE).items()
    ]
    for command in ("plan", "train", "simulate", "profile"):
        cases.append(
            Case(name=f"{command} endless", arguments=(command, "/dev/zero"), words=("/dev/zero is a device",))
        )
        cases.append(Case(name=f"{command} wrong", arguments=(command, "optim.lr=.nan"), words=("finite number",)))
    cases += [
        Case(name="a name too long", arguments=("config", "x" * 5000), words=("cannot read",)),
        Case(name="NUL in the name", arguments=("config", "a\0b"), words=("null byte",)),
        Case(
            name="brackets in the name", arguments=("config", "a[/b].yaml"), words=("no configuration at a[/b].yaml",)
        ),
        Case(
            name="escape in the name", arguments=("config", "a\x1b[31m.yaml"), words=("no configuration at a\\x1b[31m",)
        ),
    ]
    return cases


CASES = _cases()


@pytest.mark.parametrize("case", few_of_each(CASES), ids=[f"{k}-{case.name[:40]}" for k, case in enumerate(CASES)])
def test_a_configuration_that_cannot_be_meant_is_refused_in_one_sentence(case, refuse):
    refuse(case)
