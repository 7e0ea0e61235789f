"""``python -m eyas``: the same program as ``eyas``."""

import sys

from eyas.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
