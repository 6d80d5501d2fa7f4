"""``python examples/bench TABLE``: see `bench.command`."""

import sys
from pathlib import Path


def _main() -> int:
    sys.path[0] = str(Path(__file__).parents[1])  # in place of this folder: the package `bench` is in `examples`
    from bench.command import main

    return main()


if __name__ == "__main__":
    sys.exit(_main())
