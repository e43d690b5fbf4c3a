"""Start ringctl: the console script, and `python -m launcher`. Imports nothing before it minds Ctrl-C."""

import sys


def main() -> None:
    try:
        from launcher.cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
