"""Names of a composite model's modules, in adapters that were trained on the whole model.

Since version 5, transformers names them `model.language_model.layers...`; older versions name them
`language_model.model.layers...`.
"""

from __future__ import annotations

from dataclasses import replace

from .peft_config import PeftConfig

_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
)


def own_name(name: str) -> str:
    """The path of a module or parameter within the text part; unchanged if it is one already."""
    for prefix, own in _PREFIXES:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def with_own_names(config: PeftConfig) -> PeftConfig:
    """The configuration with the text part's names in its patterns and parameters."""
    return replace(
        config,
        rank_pattern=tuple((own_name(key), value) for key, value in config.rank_pattern),
        alpha_pattern=tuple((own_name(key), value) for key, value in config.alpha_pattern),
        target_parameters=tuple(sorted(map(own_name, config.target_parameters))),
        modules_to_save=tuple(map(own_name, config.modules_to_save)),
        trained_tokens=tuple((own_name(name), rows) for name, rows in config.trained_tokens),
    )
