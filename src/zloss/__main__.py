"""`python -m zloss`, and `torchrun -m zloss audit …`: the command line."""

from __future__ import annotations

import sys

from zloss.cli.main import launched, main

if __name__ == "__main__":
    code = main()
    if launched():
        from zloss.jobs import leave

        leave(code)
    sys.exit(code)
