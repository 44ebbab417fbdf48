"""Entry point of `python -m dualenc …` and `accelerate launch -m dualenc …`."""

import sys

from dualenc.cli import main

sys.exit(main())
