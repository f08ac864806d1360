"""When Python looks for garbage in a server.

References are counted, so almost nothing waits for it: cycles come from errors and from tasks that
were cancelled. Looking at all that imports have left takes a fifth of a second, in which no stream
goes on, and the default is to look for young garbage every few requests.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""So many more were made than freed before the young are looked at, which takes some ms."""


def look_for_garbage_seldom() -> None:
    """What lives now is never looked at again; to be called once a server is up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
