"""The frame of the command line."""

import json
import subprocess
import sys

from lengthwise.cli.main import VERBS


def test_help_names_every_verb_without_importing_anything_heavy():
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
    assert all(verb in done.stdout for verb in VERBS)


def test_unknown_verbs_and_options_exit_with_2(cli):
    assert cli("trian")[0] == 2
    assert cli("stats", "--nonsense")[0] == 2
    code, out, err = cli("compare", "--nonsense", "--json")
    assert code == 2 and json.loads(out)["exit_code"] == 2 and "--nonsense" in err


def test_interrupts_exit_with_130(cli, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("lengthwise.cli.commands.config.load", interrupt)
    assert cli("config")[0] == 130


def test_a_printed_configuration_says_which_words_a_setting_may_be(cli):
    code, out, _ = cli("config")
    assert code == 0 and "# shuffled | corpus | sorted | curriculum | windowed; The data order of an epoch" in out
    assert "# ulysses" not in out and '  method: ""  # random | dense | ' in out


def test_version(cli):
    assert cli("--version")[1].strip() == "0.1.0"
