"""Examines an adapter's folder on this machine, as the server does after a push."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from ...adapters.examination import IntakeReport
from ...adapters.intake import IntakeRequest, run_intake
from .adapter_folder import AdapterFolder


class AdapterBase(NamedTuple):
    """What an adapter must fit."""

    layout_json: str
    dtype: str
    max_full_matrix_bytes: int
    num_tokens: int | None
    """Of the base's tokenizer; None: it has none."""
    is_identified: bool = True
    """The layout's `base_id` is that of the checkpoint, and so the digest is the server's."""


def examine_folder(adapter: AdapterFolder, base: AdapterBase, block: Path) -> IntakeReport:
    """What intake finds, in the same kind of confined process; the block is then at `block`.

    Raises AdapterRejected, IntakeUnavailable or StorageFull.
    """
    with tempfile.TemporaryDirectory(prefix="loraplex-examine-") as name:
        directory = Path(name)
        layout_path, config_path = directory / "layout.json", directory / "config.json"
        layout_path.write_text(base.layout_json)
        config = adapter.config_for(base.num_tokens) if base.num_tokens else adapter.config
        config_path.write_text(json.dumps(config))
        return run_intake(
            IntakeRequest(
                config_path=str(config_path),
                weights_path=str(adapter.weights.absolute()),
                output_path=str(block.absolute()),
                layout_path=str(layout_path),
                serving_dtype=base.dtype,
                max_full_matrix_bytes=base.max_full_matrix_bytes,
            )
        )
