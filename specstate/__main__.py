"""``python -m specstate``: the command line, where the ``specstate`` script is not on the path."""

import sys

from specstate.cli import main

if __name__ == "__main__":
    sys.exit(main())
