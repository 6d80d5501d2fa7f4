"""``python -m hmpx``: see `hmpx.shell`."""

import sys

from hmpx.shell.main import main

if __name__ == "__main__":
    sys.exit(main())
