"""Checks each row of the PEFT feature table: the engine compared with PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.examination import examine
from loraplex.adapters.formats import REFUSED, SERVED, RefusedFeature, ServedFeature
from loraplex.adapters.identity import AdapterKey
from support.engine import Answer, LocalEngine
from support.feature_files import ALLOWED_MATRIX_BYTES, LAYOUTS, FeatureFiles
from support.peft_features import TRAINED_TOKENS, base_name, tuned_model

TOLERANCE = 1e-4
"""Of a logit, in fp32."""
MIN_EFFECT = 100 * TOLERANCE
"""What an adapter must change for its figures to prove anything."""
OUTCOME_SERVED = "served"
PROMPTS = [[5, *TRAINED_TOKENS, 40], [TRAINED_TOKENS[0]], [200, 9, TRAINED_TOKENS[-1]]]


@dataclass(frozen=True)
class Proof:
    """What came of one row's adapter."""

    outcome: str
    """`served`, or `refused:` and the code."""
    is_right: bool
    max_error: float | None = None
    """Of the served logits against PEFT's; infinite if nothing was answered."""

    def as_report(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class FeatureProofs:
    """One engine per base, and adapters made by PEFT."""

    def __init__(self, folder: Path, resources: ExitStack, device: str = "cpu") -> None:
        self._device = device
        self._files = FeatureFiles(folder)
        self._folder = folder
        self._resources = resources
        self._engines: dict[str, LocalEngine] = {}

    def prove(self, feature: ServedFeature | RefusedFeature) -> Proof:
        """Push the row's adapter, and if it is accepted ask it beside the base alone."""
        engine = self._engine(feature.name)
        block = self._folder / f"block-{feature.name}"
        try:
            key = self._examine(feature.name, engine, block)
        except AdapterRejected as exc:
            is_right = isinstance(feature, RefusedFeature) and exc.reason == feature.code
            return Proof(f"refused:{exc.reason}", is_right)
        error = self._error(feature.name, engine, key)
        return Proof(
            OUTCOME_SERVED, isinstance(feature, ServedFeature) and error <= TOLERANCE, error
        )

    def _engine(self, feature: str) -> LocalEngine:
        name = base_name(feature)
        if name not in self._engines:
            engine = LocalEngine(
                self._files.base(feature), self._folder, device=self._device, dtype="float32"
            )
            self._resources.callback(engine.close)
            self._engines[name] = engine
        return self._engines[name]

    def _examine(self, feature: str, engine: LocalEngine, block: Path) -> AdapterKey:
        adapter = self._files.adapter(feature)
        if feature == "base_weights":
            _train_the_copy(adapter / "adapter_model.safetensors")
        report = examine(
            adapter / "adapter_config.json",
            adapter / "adapter_model.safetensors",
            block,
            layout=LAYOUTS.get(feature, engine.core.info.layout),
            serving_dtype=engine.core.info.dtype,
            max_full_matrix_bytes=ALLOWED_MATRIX_BYTES.get(feature, 1 << 20),
        )
        key = AdapterKey("acme", report.digest)
        engine.paths[key] = block
        engine.invocations[key] = report.invocation_token_ids
        return key

    def _error(self, feature: str, engine: LocalEngine, key: AdapterKey) -> float:
        base = AutoModelForCausalLM.from_pretrained(self._files.base(feature)).eval()
        plain = _next_logits(base)
        tuned = _next_logits(tuned_model(feature, base, self._files.adapter(feature)).eval())
        effect = (tuned[:, : plain.shape[1]] - plain).abs().amax()
        assert effect > MIN_EFFECT, f"{feature} must have an effect"
        names = [
            engine.submit(prompt, adapter, return_logits=True, max_tokens=1)
            for adapter in (None, key)
            for prompt in PROMPTS
        ]
        engine.run()
        found = [_first_logits(engine.answers[name]) for name in names]
        if any(logits is None for logits in found):
            return float("inf")
        expected = [*plain, *tuned]
        errors = [
            (logits[: len(own)] - own).abs().max()  # the step may have tokens of the other's
            for logits, own in zip(found, expected, strict=True)
            if logits is not None
        ]
        return float(max(errors))


@contextmanager
def open_feature_proofs(device: str = "cpu") -> Iterator[FeatureProofs]:
    """Proofs on an engine of this device; PEFT computes on the CPU."""
    with TemporaryDirectory() as directory, ExitStack() as resources:
        yield FeatureProofs(Path(directory), resources, device)


def prove_all_features() -> dict[str, Proof]:
    """Every row of the table, by name."""
    rows: list[ServedFeature | RefusedFeature] = [*SERVED, *REFUSED]
    with open_feature_proofs() as proofs:
        return {feature.name: proofs.prove(feature) for feature in rows}


def _train_the_copy(path: Path) -> None:
    """Let the copy of the base's matrix differ: an equal one is left out and served without."""
    tensors = load(path.read_bytes())
    save_file(
        {name: value * (1.5 if "base_layer" in name else 1) for name, value in tensors.items()},
        path,
    )


def _next_logits(model: Any) -> Tensor:
    """What the model says behind each prompt: `[prompts, vocab_size]`."""
    with torch.no_grad():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])


def _first_logits(answer: Answer) -> Tensor | None:
    """The raw logits of the first generated position, if there is one."""
    if not answer.tokens or answer.tokens[0].logits is None:
        return None
    return torch.from_numpy(np.frombuffer(answer.tokens[0].logits, np.float32).copy())
