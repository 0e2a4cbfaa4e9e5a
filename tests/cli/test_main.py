"""The frame of the command line."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from importlib import import_module

import pytest

from lengthwise.cli.main import COMMANDS, main
from lengthwise.core.atomic_write import new_folder
from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings

NO_TORCH = "this command needs torch, which is not installed: pip install 'lengthwise[train]'"


def test_help_names_every_command_without_importing_anything_heavy():
    code = (
        "import sys; sys.argv = ['lengthwise', '--help']\n"
        "from lengthwise.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'pydantic', 'jinja2', 'transformers', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


def test_unknown_commands_and_options_exit_with_2(cli):
    assert cli("trian")[0] == 2
    assert cli("stats", "--nonsense")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--nonsense"], "No such option: --nonsense"),
        (["compare", "--seed", "-1"], "'--seed': Input should be greater than or equal to 0"),
        (["memory", "--length", "0"], "'--length': '0' is not a number of tokens from 1"),
        (["trian"], "no command 'trian'; did you mean train?"),
    ],
)
def test_json_says_why_a_command_line_is_wrong(cli, arguments, message):
    code, out, err = cli(*arguments, "--json")
    failure = json.loads(out)
    assert code == failure["exit_code"] == 2 and message in failure["error"] and message in err


def test_interrupts_exit_with_130(cli, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("lengthwise.cli.commands.config.load", interrupt)
    assert cli("config")[0] == 130


def test_an_interrupt_while_a_command_is_imported_is_told_as_any_other(cli, monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("lengthwise.cli.main.import_module", interrupt)
    code, out, err = cli("stats", "nowhere", "--json")
    assert (code, json.loads(out)["exit_code"], err) == (130, 130, "error: interrupted\n")


def test_an_interrupt_while_the_command_line_is_imported_is_told_as_any_other(monkeypatch, capsys):
    def interrupt(self, name, *_):
        if name == "lengthwise.cli.main":
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "lengthwise.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [type("Finder", (), {"find_spec": interrupt})(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["lengthwise", "stats", "--json"])
    with pytest.raises(SystemExit) as left:
        import_module("lengthwise.__main__").main()
    out, err = capsys.readouterr()
    assert (left.value.code, json.loads(out)["exit_code"], err) == (130, 130, "error: interrupted\n")


def test_a_command_that_writes_is_ended_by_a_signal_as_by_an_error(cli, monkeypatch, tmp_path):
    def stop(*_, **__):
        with new_folder(tmp_path / "out", setting="--out"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("lengthwise.session.export_run.export_run", stop)
    code, out, err = cli("export", tmp_path, "--out", tmp_path / "out", "--json")
    assert (code, json.loads(out)["exit_code"]) == (143, 143) and "stopped by SIGTERM" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (["train", "--nproc", "2"], "--nproc 2"),
        (["train", "--max-restarts", "3"], "--max-restarts 3"),
        (["train", "--nproc", "2", "--max-restarts", "3"], "--nproc 2 and --max-restarts 3"),
        (["profile", "--nproc", "2"], "--nproc 2"),
        (["analyze", "INDEX", "--metric", "length", "--nproc", "2"], "--nproc 2"),
    ],
)
def test_ranks_that_a_rank_is_to_start_are_refused_with_the_variables(cli, monkeypatch, command, asked):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = cli(*command)
    assert code == 2 and f"{asked}: RANK=0 and WORLD_SIZE=1 are set" in err


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "stopped by SIGTERM while"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "stopped by a signal, as torchrun sends where it"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LENGTHWISE_LAUNCHER": "1"}, ""),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ""),
    ],
)
def test_who_is_told_that_a_signal_stopped_a_process_before_it_began(cli, monkeypatch, variables, words):
    """Not the user by a rank whose launcher says which one has failed."""
    for name in ("RANK", "WORLD_SIZE", "LENGTHWISE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "lengthwise.cli.commands.train.split_arguments", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    code, _, err = cli("train")
    assert code == 75 and words in err and bool(err) == bool(words)


def test_a_printed_configuration_says_which_words_a_setting_may_be(cli):
    code, out, _ = cli("config")
    assert code == 0 and "# shuffled | corpus | sorted | curriculum | windowed; The data order of an epoch" in out
    assert "# ulysses" not in out and '  method: ""  # random | dense | ' in out


def test_version(cli):
    assert cli("--version")[1].strip() == "0.1.0"


def test_a_mistyped_command_is_told_the_nearest(cli):
    code, _, err = cli("trian")
    assert code == 2 and "did you mean train?" in err
    assert "known: " in cli("zzzz")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("memory", "--model", "llama-7b"), "Presets: A100-40GB, A100-80GB"),
        (("compare", "--lengths", "code", "--model", "llama-7b", "--gpus", "8"), "or give a YAML file of a device"),
        (("memory", "--model", "a", "--device", "b", "--dtype", "bfloat61"), "did you mean bfloat16?"),
        (("compare", "--over-length", "spilt"), "did you mean split?"),
        (("plan", "--lengths", "code"), "such as data.index=FOLDER; lengths without a configuration are planned by: "),
        (("memory", "--length", "many"), "'many' is not a number of tokens from 1 to 1,099,511,627,776, such as 4096"),
        (("profile", "--max-tokens", "31"), "'31' is not a number of tokens from 32 to"),
        (("stats", "x", "--max-length", "1.5"), "'1.5' is not a number of tokens"),
        (("analyze", "x", "--metric", "length", "--max-tokens", "0K"), "'0K' is not a number of tokens"),
    ],
)
def test_what_an_option_may_be_is_said_where_it_is_wrong_or_missing(cli, arguments, message):
    code, _, err = cli(*arguments)
    assert code == 2 and message in " ".join(err.replace("\u2502", " ").split())


def test_tab_completes_commands_without_importing_any_and_options_of_the_command_that_is_named():
    def completed(words):
        code = (
            "import sys; sys.argv = ['lengthwise']\n"
            "from lengthwise.cli.main import main\n"
            "try: main()\n"
            "finally: print(sorted(m for m in sys.modules if m.startswith('lengthwise.cli.commands.')))\n"
        )
        variables = {"_LENGTHWISE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **variables}
        )
        return done.stdout.split()

    assert completed("lengthwise p") == ["profile", "plan", "[]"]
    assert completed("lengthwise --install") == ["--install-completion", "[]"]
    assert completed("lengthwise plan --o") == ["--out", "['lengthwise.cli.commands.plan']"]


HELP_OF_ALL = """
import os, sys, tests.no_torch
import numpy, pydantic, rich.table, typer.rich_utils, yaml
import lengthwise.config.run_config
from lengthwise.cli.main import COMMANDS, main

for command in COMMANDS:
    if os.fork() == 0:  # each has imported what most do, and nothing else that another one does
        sys.argv = ["lengthwise", command, "--help"]
        os.dup2(os.open(command + ".err", os.O_CREAT | os.O_WRONLY), 2)
        main()
        sys.exit()
    _, status = os.wait()
    print(command, os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.parametrize("command", ["", "stats", "compare"])
def test_the_short_option_asks_for_help_too(command, monkeypatch, capsys):
    for option in ("-h", "--help"):
        monkeypatch.setattr("sys.argv", ["lengthwise", *command.split(), option])
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code
    printed = capsys.readouterr().out
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :] and "Usage: " in printed


def test_without_torch_every_command_has_help_or_says_what_to_install(tmp_path):
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    run = partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path, env=variables)
    printed = run([sys.executable, "-c", HELP_OF_ALL]).stdout
    codes = {command: int(code) for command, code in re.findall(r"^(\S+) (\d+)$", printed, re.M)}
    assert codes.keys() == set(COMMANDS)
    for command, code in codes.items():
        told = (tmp_path / f"{command}.err").read_text()
        assert (code, told) in ((0, ""), (2, f"error: {NO_TORCH}\n")), command


NEEDING_TORCH = (
    ("train", "data.index=DIR"), ("profile", "data.index=DIR"), ("demo",), ("export", "RUN", "--out", "OUT"),
    ("analyze", "DIR", "--metric", "length"),
)  # fmt: skip
EACH_BY_ITSELF = """
import os, shutil, sys, tests.no_torch
import lengthwise.config.run_config
from lengthwise.cli.main import main

for words in map(str.split, sys.argv[1:]):
    if os.fork() == 0:  # with files of its own
        shutil.copytree("files", words[0])
        os.dup2(os.open(words[0] + ".err", os.O_CREAT | os.O_WRONLY), 2)
        os.chdir(words[0])
        sys.argv = ["lengthwise", *words]
        main()
        sys.exit()
    _, status = os.wait()
    print(words[0], os.waitstatus_to_exitcode(status), flush=True)
"""


def test_commands_that_need_torch_say_so_before_they_write_anything(tmp_path):
    files = tmp_path / "files"
    (files / "SRC").mkdir(parents=True)
    (files / "SRC" / "1.txt").write_text("words and words " * 9)
    build_index(IndexSettings(source=files / "SRC"), files / "DIR", workers=1)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-c", EACH_BY_ITSELF, *map(" ".join, NEEDING_TORCH)]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables).stdout
    assert printed.splitlines() == [f"{words[0]} 2" for words in NEEDING_TORCH]
    for name, *_ in NEEDING_TORCH:
        assert (tmp_path / f"{name}.err").read_text().endswith(f"error: {NO_TORCH}\n"), name
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["DIR", "SRC"], name


def test_commands_say_that_the_current_folder_was_removed(cli, tmp_path, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, _, error = cli("config")
    assert code == 2 and "the current folder was removed" in error
