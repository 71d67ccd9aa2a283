"""``python -m msattn.cli``: the ``msattn`` command without its script."""

import sys

from . import main

sys.exit(main())
