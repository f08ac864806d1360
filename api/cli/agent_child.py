"""An agent that ends with the process that started it: `python -m loraplex.api.cli.agent_child`.

Standard input carries no data; its end means that the parent has exited.
"""

from __future__ import annotations

import os
import sys
import threading

from . import main


def _watch_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.argv = ["loraplex", "agent", *sys.argv[1:]]
    threading.Thread(target=_watch_parent, daemon=True).start()
    sys.exit(main())
