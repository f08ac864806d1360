"""A trainer with the priority of the tests: `python -m support.quick_trainer`.

With its own, the lowest, it would wait for all other tests.
"""

from __future__ import annotations

import os
from unittest.mock import patch

from loraplex.engine.tuning import confinement, process

if __name__ == "__main__":
    with patch.object(confinement, "NICENESS", os.getpriority(os.PRIO_PROCESS, 0)):
        process.main()
