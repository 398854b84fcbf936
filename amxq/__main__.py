"""``python -m amxq``: the same as the command ``amxq``."""

import sys

from amxq.cli import main

sys.exit(main())
