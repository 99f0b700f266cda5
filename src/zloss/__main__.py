"""`python -m zloss`, and `torchrun -m zloss audit …`: the command line."""

from __future__ import annotations

import sys

from zloss.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
