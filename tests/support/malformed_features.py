"""Malformed adapters with every supported PEFT feature: none may crash or hang intake.

`feature_proofs` tests the effect of adapters on the base; these tests check that refusals have a
published code and a pointer, and are fast enough.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.formats import SERVED
from support.feature_files import FeatureFiles
from support.malformed import MAX_CPU_SECONDS, Hang, Outcome, cpu_limit, is_published
from support.mutators import AdapterFiles, mutated


def run_malformed_features(count: int, *, seed: int = 0) -> Outcome:
    """Examine `count` adapters of each feature, and each one as it was."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as directory:
        features = FeatureFiles(Path(directory))
        for feature in SERVED:
            folder = features.adapter(feature.name)
            valid = AdapterFiles(
                (folder / "adapter_config.json").read_bytes(),
                (folder / "adapter_model.safetensors").read_bytes(),
            )
            for name, files in mutated(valid, count, seed, label=feature.name):
                outcome.tried += 1
                _try_one(features, feature.name, name, files, outcome)
            _try_one(features, feature.name, "as it was", valid, good := Outcome())
            outcome.good_refused += good.refused + len(good.crashes)
    return outcome


def _try_one(
    features: FeatureFiles, feature: str, name: str, files: AdapterFiles, outcome: Outcome
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "adapter_config.json").write_bytes(files.config)
        (folder / "adapter_model.safetensors").write_bytes(files.weights)
        try:
            with cpu_limit(MAX_CPU_SECONDS):
                features.examine(feature, folder / "block", folder=folder)
        except AdapterRejected as exc:
            outcome.refused += 1
            outcome.codes.add(exc.reason)
            if not is_published(exc):
                outcome.uncoded.append(f"{name}: {exc.reason} {exc.pointer} {exc}")
        except Hang:
            outcome.hangs.append(name)
        except Exception as exc:  # a crash is what is counted here
            outcome.crashes.append(f"{name}: {exc!r}")
