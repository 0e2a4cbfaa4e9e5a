"""Names of files in messages and in commands to copy."""

import os
import subprocess

from lengthwise.core.atomic_write import shell_word


def test_words_of_commands_are_on_one_printable_line_and_lead_to_the_file_in_a_shell():
    names = ["plain", "a b", "it's", "Папка", os.fsdecode(b"o_bad\xff"), "it's\\\n\x1b[2J \u2028 Ж \xa0\x7f1"]
    words = [shell_word(name) for name in names]
    assert " ".join(words).isprintable() and words[0] == "plain" and words[4] == r"$'o_bad\xff'"
    echoed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], stdout=subprocess.PIPE, check=True
    ).stdout
    assert echoed.split(b"\0")[:-1] == [os.fsencode(name) for name in names]
