"""``python -m engram_core``: the command line where the console script is not on the PATH."""

import sys

from engram_core.cli import main

sys.exit(main())
