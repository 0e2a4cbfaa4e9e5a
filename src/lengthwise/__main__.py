"""``python -m lengthwise``: the command line."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is imported ends it as it does later."""
    try:
        from lengthwise.cli.main import main as run
    except KeyboardInterrupt:
        if "--json" in sys.argv:
            sys.stdout.write('{"error": "interrupted", "exit_code": 130}\n')
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
