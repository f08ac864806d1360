"""Self-speculation: the base's first layers, its norm and its output head propose tokens.

Draft & Verify (Zhang et al. 2023), LayerSkip (Elhoushi et al. 2024). It needs no further weights or
memory: a draft token writes its keys and values of those layers where verification writes the same
ones again. It runs with its request's adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters.leases import Lease
from ..config import EngineConfig
from ..draft import Draft
from ..errors import InvalidParameter, UnsupportedModel
from ..execution.runner import ModelRunner, StepOutput
from ..model.attention_windows import LayerProbe
from ..model.base_model import BaseModel
from ..model.forward import run_model
from ..model.inputs import SequenceChunk
from ..request import Request
from .drawing import DraftDrawing, GrowingChain, draw_next, make_drawing
from .proposer import DraftRequest


class FirstLayers:
    """Truncates a model to its first layers, and restores it afterwards.

    The output is that of the model with this number of layers: its norm and head follow the last.
    """

    def __init__(self, model: nn.Module, config: Any, num_layers: int) -> None:
        """Raises UnsupportedModel if the model does not run its layers in sequence."""
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
        probe = LayerProbe()
        zero = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
        try:
            with self.only():
                run_model(model, probe, zero, zero, zero)
        except Exception as exc:  # any error of the model's code means that it cannot exit early
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


class EarlyExitProposer:
    name = "early_exit"
    needs_hidden_states = False

    def __init__(self, layers: FirstLayers, runner: ModelRunner, drawing: DraftDrawing) -> None:
        self._layers = layers
        self._runner = runner
        self._graphs = runner.graphs_within("early exit", layers.only)
        self._drawing = drawing

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        chains = [GrowingChain(request, num_tokens) for request, num_tokens in wanted]
        try:
            while growing := [chain for chain in chains if chain.wants_more]:
                self._grow(growing)
        except BaseException:
            for chain in chains:
                self._clear(chain)
            raise
        return [chain.draft() for chain in chains]

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """The cache that it shares is the target's."""

    def forget(self, request_id: str) -> None:
        """It keeps nothing per request."""

    def _grow(self, chains: Sequence[GrowingChain]) -> None:
        """Give each of them one token more; a result that is not finite ends it."""
        output = self._run(
            list(map(_last_token, chains)), [chain.request.lease for chain in chains]
        )
        finite = output.finite
        for chain, is_finite in zip(chains, finite, strict=True):
            if not is_finite:
                chain.num_tokens = len(chain.token_ids)
                self._clear(chain)
        sound = [index for index, is_finite in enumerate(finite) if is_finite]
        if sound:
            draw_next([chains[index] for index in sound], output.logits[sound], self._drawing)

    def _run(self, chunks: Sequence[SequenceChunk], leases: Sequence[Lease | None]) -> StepOutput:
        if self._graphs:
            output = self._runner.replay(self._graphs, chunks, leases)
            if output is not None:
                return output
        with self._layers.only():
            return self._runner.run_chunks(chunks, leases)

    def _clear(self, chain: GrowingChain) -> None:
        """Leave nothing of the drafted positions, should no verification write them again."""
        start = len(chain.request.token_ids)
        self._runner.clear(chain.request, start, start + len(chain.token_ids))


def _last_token(chain: GrowingChain) -> SequenceChunk:
    """Known or drafted."""
    known = chain.request.token_ids
    last = (chain.token_ids or known)[-1]
    start = len(known) + len(chain.token_ids) - 1
    kv = chain.request.kv
    return SequenceChunk(
        [last],
        start=start,
        tables=kv.tables,
        num_evicted=kv.num_evicted,
        rotary_start=chain.request.namespace.rotary_start,
    )


def num_exit_layers(config: EngineConfig) -> int:
    """The layers of the configuration's early exit, 0 without one."""
    entries = (entry.partition(":") for entry in config.speculation)
    counts = [argument for name, _, argument in entries if name == EarlyExitProposer.name]
    return sum(int(argument) for argument in counts if argument.isdecimal())


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
