"""Processes for ranks that share no memory and import nothing anew.

They are forks of one server, which has imported what loads a divided base and done nothing else: a
new interpreter takes seconds of imports.
"""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext

_IMPORTED = ["loraplex.engine.model.sharded_base"]


def rank_processes() -> ForkServerContext:
    """The context that starts such processes and pools of them."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context
