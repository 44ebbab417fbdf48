"""`python -m dualenc …`, also for `accelerate launch -m dualenc …`."""

import sys

from dualenc.cli import main

sys.exit(main())
