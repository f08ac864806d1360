"""Self-speculation: the target's own first layers guess, then its norm and output head.

Draft & Verify (Zhang et al. 2023), LayerSkip (Elhoushi et al. 2024). Nothing is added to the
target, neither weights nor memory: a guess writes its keys and values of those layers where the
verification writes the same ones again. It runs under its request's adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..admission import ShapeProbe
from ..base_model import BaseModel
from ..config import EngineConfig
from ..errors import InvalidParameter, UnsupportedModel
from ..forward import run_model
from ..inputs import Span
from ..request import Request
from ..runner import ModelRunner
from .draft import Draft
from .drawing import DraftDrawing, make_drawing, row_behind
from .proposer import Wanted


class FirstLayers:
    """A model that stops behind its first layers, and is itself again afterwards.

    The output is that of the model cut to so many layers: its norm and head follow the last.
    """

    def __init__(self, model: nn.Module, config: Any, num_layers: int) -> None:
        """Raises UnsupportedModel if the model goes another way through its layers."""
        path, layers = _layer_list(model, config)
        parent, _, self._name = path.rpartition(".")
        self._parent = model.get_submodule(parent)
        self._all, self._first = layers, layers[:num_layers]
        self._check(model, config)

    @contextmanager
    def only(self) -> Iterator[None]:
        """The model's forwards inside run these layers alone."""
        setattr(self._parent, self._name, self._first)
        try:
            yield
        finally:
            setattr(self._parent, self._name, self._all)

    def _check(self, model: nn.Module, config: Any) -> None:
        probe = ShapeProbe()
        zero = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
        try:
            with self.only():
                run_model(model, probe, zero, zero, zero)
        except Exception as exc:
            raise _cannot_exit(config) from exc
        if probe.calls != list(range(len(self._first))):
            raise _cannot_exit(config)


def _layer_list(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList]:
    """The decoder's layers and their path; the outermost list of that length is theirs."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return path, module
    raise _cannot_exit(config)


def _cannot_exit(config: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"speculation early_exit: {config.model_type} does not run its first layers alone"
    )


@dataclass(slots=True)
class _Guesses:
    """What grows into one request's draft."""

    request: Request
    num_tokens: int
    token_ids: list[int] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)
    is_broken: bool = False
    """A result was not finite."""

    @property
    def wants_more(self) -> bool:
        return not self.is_broken and len(self.token_ids) < self.num_tokens

    @property
    def span(self) -> Span:
        """The last token, known or guessed."""
        tokens = self.token_ids or self.request.token_ids
        start = len(self.request.token_ids) + len(self.token_ids) - 1
        return Span([tokens[-1]], start=start, tables=self.request.kv.tables)

    def draft(self) -> Draft:
        probabilities = torch.stack(self.probabilities) if self.probabilities else None
        return Draft(tuple(self.token_ids), probabilities=probabilities)


class EarlyExitProposer:
    name = "early_exit"
    needs_hidden_states = False

    def __init__(self, layers: FirstLayers, runner: ModelRunner, drawing: DraftDrawing) -> None:
        self._layers = layers
        self._runner = runner
        self._drawing = drawing

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        guesses = [_Guesses(request, num_tokens) for request, num_tokens in wanted]
        try:
            while growing := [entry for entry in guesses if entry.wants_more]:
                self._grow(growing)
        except BaseException:
            for entry in guesses:
                self._clear(entry)
            raise
        return [entry.draft() for entry in guesses]

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """The cache that it shares is the target's."""

    def forget(self, request_id: str) -> None:
        """It keeps nothing."""

    def _grow(self, guesses: Sequence[_Guesses]) -> None:
        """Give each of them one token more; a result that is not finite ends it."""
        with self._layers.only():
            logits = self._runner.run_spans(
                [entry.span for entry in guesses], [entry.request.lease for entry in guesses]
            ).logits
        finite = logits.isfinite().all(-1).tolist()
        for entry, is_finite in zip(guesses, finite, strict=True):
            if not is_finite:
                entry.is_broken = True
                self._clear(entry)
        sound = [index for index, is_finite in enumerate(finite) if is_finite]
        if sound:
            self._draw([guesses[index] for index in sound], logits[sound])

    def _draw(self, guesses: Sequence[_Guesses], logits: Tensor) -> None:
        rows = [row_behind(entry.request, entry.token_ids) for entry in guesses]
        token_ids, probabilities = self._drawing.draw(rows, logits)
        for index, (entry, token) in enumerate(zip(guesses, token_ids, strict=True)):
            entry.token_ids.append(token)
            if probabilities is not None:
                entry.probabilities.append(probabilities[index])

    def _clear(self, guesses: _Guesses) -> None:
        """Leave nothing of the guessed positions, should no verification write them again."""
        start = len(guesses.request.token_ids)
        self._runner.clear(guesses.request, start, start + len(guesses.token_ids))


def open_early_exit(
    argument: str, config: EngineConfig, base: BaseModel, runner: ModelRunner
) -> EarlyExitProposer:
    """`argument`: of how many layers. Raises InvalidParameter or UnsupportedModel."""
    num_layers = base.config.num_hidden_layers
    if not argument.isdecimal() or not 1 <= int(argument) < num_layers:
        raise InvalidParameter(
            "speculation", f"early_exit takes a number of layers from 1 to {num_layers - 1}"
        )
    layers = FirstLayers(base.model, base.config, int(argument))
    return EarlyExitProposer(layers, runner, make_drawing(config.acceptance))
