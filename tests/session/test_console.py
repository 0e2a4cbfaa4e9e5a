"""Messages on stderr, whoever reads them."""

import io
import os
import sys

from lengthwise.session import console


def test_messages_go_on_where_their_reader_has_gone(monkeypatch):
    reader, writer = os.pipe()
    stream = io.TextIOWrapper(os.fdopen(writer, "wb"), "ascii")  # as python keeps it in sys.__stderr__
    monkeypatch.setattr(sys, "stderr", stream)
    console.prepare_streams()
    console.stderr().print("first", soft_wrap=True)
    console.print_error("\N{SNOWMAN}")
    assert os.read(reader, 99) == b"first\nerror: \\u2603\n"
    os.close(reader)
    for _ in range(3):
        console.stderr().print("nobody reads this", soft_wrap=True)
        console.print_error("nor this")
        sys.stderr.write("nor" * 10_000)
    sys.stderr.flush()
    stream.close()
