"""A relay of another trainer than the real one: `python -m support.relay MODULE ...`, with the
module of that trainer before the real relay's arguments."""

from __future__ import annotations

import sys

from loraplex.api.ray.trainer_relay import main

if __name__ == "__main__":
    main(sys.argv.pop(1))
