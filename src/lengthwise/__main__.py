"""``python -m lengthwise``: the command line."""

from lengthwise.cli.main import main

main()
