"""Small bases and one adapter per PEFT feature, created once and kept in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from loraplex.adapters.examination import IntakeReport, examine
from loraplex.adapters.layout import BaseLayout, Projection, Slice
from support.layouts import BASE_ID, full_layout_of
from support.peft_features import base_name, make_adapter, save_base

ALLOWED_MATRIX_BYTES = {"full_matrix_not_allowed": 0, "full_matrix_too_large": 1 << 10}
"""Where a feature depends on what the operator allows."""
TEXT_PART = BaseLayout(
    BASE_ID, (Projection((Slice("model.layers.0.self_attn.q_proj", 64, 64),)),), is_text_part=True
)
LAYOUTS = {"other_part": TEXT_PART}
"""Of bases that cannot be made here."""


class FeatureFiles:
    """Makes on demand what a test asks for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layouts: dict[str, BaseLayout] = {}

    def base(self, feature: str) -> Path:
        """The base model that this feature is trained on."""
        path = self._folder / f"base-{base_name(feature)}"
        return path if path.exists() else save_base(base_name(feature), path)

    def layout(self, feature: str) -> BaseLayout:
        if feature in LAYOUTS:
            return LAYOUTS[feature]
        name = base_name(feature)
        if name not in self._layouts:
            self._layouts[name] = full_layout_of(self.base(feature))
        return self._layouts[name]

    def adapter(self, feature: str) -> Path:
        path = self._folder / f"adapter-{feature}"
        if not path.exists():
            model = AutoModelForCausalLM.from_pretrained(self.base(feature))
            make_adapter(feature, path, model)
        return path

    def examine(
        self, feature: str, output: Path, *, folder: Path | None = None, **settings: Any
    ) -> IntakeReport:
        """Examine the feature's adapter, or the one in `folder`."""
        folder = folder or self.adapter(feature)
        return examine(
            folder / "adapter_config.json",
            folder / "adapter_model.safetensors",
            output,
            **{
                "layout": self.layout(feature),
                "serving_dtype": "float32",
                "max_full_matrix_bytes": ALLOWED_MATRIX_BYTES.get(feature, 1 << 20),
                **settings,
            },
        )
