"""The environment of a trainer process: nothing of the server's secrets."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ...adapters.logs import LOG_VARIABLES

_PASSED = LOG_VARIABLES | {
    *("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONDONTWRITEBYTECODE"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
}


def trainer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that training needs, and the import path. No credentials of the store or the
    database are among them, and no library looks for anything in the network."""
    passed = {
        name: value
        for name, value in environment.items()
        if name in _PASSED or name.startswith("LC_")
    }
    import_path = os.pathsep.join(filter(None, sys.path))
    own = {"PYTHONPATH": import_path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**passed, **own}
