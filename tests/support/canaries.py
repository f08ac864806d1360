"""Adapters whose every answer names them, so that isolation is visible without a reference run.

In the canary base, dimension 0 of the residual stream has the same positive constant at every
position, and the last layer's attention passes it on as its first value. A canary's rank-1 delta on
that layer's `o_proj` reads it and writes the output embedding of its marker with a much larger
magnitude than everything else. The head's rows of all marker candidates have a negative weight on
dimension 0, so the base alone never outputs a marker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.identity import AdapterKey, composed_key
from loraplex.engine.messages import Abort, DeleteAdapter, FinishReason
from support.borders import swing
from support.engine import LocalEngine
from support.models import make_adapter, make_tiny_llama

MARKERS = range(10, 74)
NUM_CANARIES = 24
WAVE = 100
_CONSTANT = 4.0
DISLIKE = -100.0
LOUDNESS = 1000.0
QUIET = 0.25
"""The weight of the second member of a composition."""
_TARGET = "model.layers.1.self_attn.o_proj"


def make_canary_base(path: Path) -> Path:
    """A tiny Llama prepared as the module says."""
    make_tiny_llama(path, tie_word_embeddings=False)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = _CONSTANT
    for layer in (0, 1):
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"][0] = 0
        weights[f"model.layers.{layer}.mlp.down_proj.weight"][0] = 0
    value = weights["model.layers.1.self_attn.v_proj.weight"]
    value[0] = 0
    value[0, 0] = 1
    weights["lm_head.weight"][list(MARKERS), 0] = DISLIKE
    save_file(weights, file, metadata={"format": "pt"})
    return path


def make_canary_adapter(base: Path, path: Path, *, marker: int, rank: int = 1) -> Path:
    """An adapter that answers `marker` to everything; ranks above 1 are padded with zeros."""
    make_adapter(base, path, seed=marker, r=rank, lora_alpha=rank, target_modules=[_TARGET])
    head = load_file(base / "model.safetensors")["lm_head.weight"][marker].clone()
    head[0] = 0
    file = path / "adapter_model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    tensors[f"base_model.model.{_TARGET}.lora_A.weight"][0, 0] = 1
    tensors[f"base_model.model.{_TARGET}.lora_B.weight"][:, 0] = LOUDNESS * head
    save_file(tensors, file, metadata={"format": "pt"})
    return path


class Canaries(NamedTuple):
    """A base and the adapters over it."""

    make_base: Callable[[Path], Path]
    make_adapter: Callable[..., Path]
    """As `make_canary_adapter`."""
    beginnings: Sequence[Sequence[int]] = ((),)
    """The first tokens of a prompt are one of these."""
    invocation: Sequence[int] = ()
    """The tokens from which on the adapters act, of half of the prompts; (): on all tokens."""
    tokens: range = range(256)
    """The other tokens of prompts."""
    config: Mapping[str, object] = MappingProxyType({})
    """Further settings of the engine."""


PLAIN = Canaries(make_canary_base, make_canary_adapter)


def run_canaries(
    num_requests: int,
    seed: int,
    *,
    canaries: Canaries = PLAIN,
    directory: Path | None = None,
    num_ranks: int = 1,
    composes: bool = False,
) -> dict[str, int]:
    """Ask a crowd of canaries while they are paged, replaced, drained and deleted, and while the
    border between adapters and KV cache moves, if their configuration does not fix it.

    `composes`: ask compositions of two of a tenant's canaries too, which say the louder's marker.

    Returns `{"requests", "foreign", "evictions", "deleted", "tokens_from_host",
    "blocks_from_disk"}`: foreign counts answers that say any marker but the asked adapter's own, or
    none where one is due.
    """
    with TemporaryDirectory(dir=directory) as home:
        crowd = _Crowd(canaries, Path(home), Random(seed), num_ranks, composes)
        try:
            return crowd.run(num_requests)
        finally:
            crowd.engine.close()


class _Crowd:
    """Canaries of five tenants, a fourth of which fit on the device and half in host memory."""

    def __init__(
        self, canaries: Canaries, home: Path, rng: Random, num_ranks: int, composes: bool
    ) -> None:
        self._canaries = canaries
        self._home = home
        self._rng = rng
        self._composes = composes
        self._base = canaries.make_base(home / "base")
        self._free_markers = list(MARKERS)
        probe = LocalEngine(self._base, home)
        block = probe.examine(self._make_folder(MARKERS[0], rank=4), home / "probe.block")
        probe.close()
        self.engine = LocalEngine(
            self._base,
            home,
            host_cache_bytes=12 * block.size_bytes,
            max_num_seqs=32,
            loader_duty=1.0,
            tensor_parallel_size=num_ranks,
            **{"arena_bytes": 6 * block.size_bytes, **canaries.config},
        )
        if self.engine.core.parts.border:
            swing(self.engine)
        self._keys: dict[int, AdapterKey] = {}
        """Of every marker that was ever added."""
        self._live: dict[AdapterKey, int] = {}
        self._num_asked = 0
        self._markers: dict[str, int | None] = {}
        """Of every request: what its answer must say; None for the base."""
        self._num_deleted = 0

    def run(self, num_requests: int) -> dict[str, int]:
        for _ in range(NUM_CANARIES):
            self._add()
        foreign = 0
        for number in range(num_requests):
            if number % WAVE == 0:
                # Waves: how much is paged must not depend on how fast loads are.
                self.engine.run()
                foreign += self._judge()
                self._replace_one()
            self._ask()
            for _ in range(self._rng.randint(0, 2)):
                self.engine.step()
        self.engine.run()
        foreign += self._judge()
        stats = self.engine.core.stats()
        return {
            "requests": num_requests,
            "foreign": foreign,
            "evictions": stats.num_adapter_evictions,
            "deleted": self._num_deleted,
            "tokens_from_host": stats.num_host_cached_tokens,
            "blocks_from_disk": stats.num_blocks_from_disk,
        }

    def _make_folder(self, marker: int, rank: int) -> Path:
        folder = self._home / f"{marker}-{rank}"
        if not folder.exists():
            self._canaries.make_adapter(self._base, folder, marker=marker, rank=rank)
        return folder

    def _add(self) -> None:
        marker = self._free_markers.pop(self._rng.randrange(len(self._free_markers)))
        if marker not in self._keys:
            folder = self._make_folder(marker, rank=1 + marker % 4)
            self._keys[marker] = self.engine.add_adapter(folder, f"tenant-{marker % 5}")
        key = self._keys[marker]
        if self._composes:
            self._compose(key, marker)
        self._live[key] = marker

    def _compose(self, key: AdapterKey, marker: int) -> None:
        """Compositions with another one of its tenant: once it is the louder, once the other."""
        rivals = [each for each in self._live if each.tenant_id == key.tenant_id]
        rivals = [each for each in rivals if not each.members]
        if rivals:
            other = self._rng.choice(rivals)
            for loud, quiet in ((key, other), (other, key)):
                weights = {loud.digest: 1.0, quiet.digest: QUIET}
                composed = composed_key(key.tenant_id, weights)
                self._live[composed] = marker if loud is key else self._live[other]

    def _replace_one(self) -> None:
        """A new canary comes; an old one is deleted while it is asked, at once or drained."""
        key = self._rng.choice([each for each in self._live if not each.members])
        for _ in range(3):
            self._ask(key)
            self.engine.step()
        self.engine.core.handle(DeleteAdapter(key, self._rng.choice([0.0, 0.0, 5.0])))
        self._free_markers.append(self._live.pop(key))
        self._live = {each: said for each, said in self._live.items() if not each.has_part(key)}
        self._num_deleted += 1
        self._add()

    def _ask(self, key: AdapterKey | None = None) -> None:
        if key is None:
            key = self._rng.choice(
                [None, *self._live, *list(self._live)[:4], *self._compositions()]
            )
        prompt, is_invoked = self._prompt()
        self._num_asked += 1
        request_id = self.engine.submit(
            prompt,
            key,
            request_id=f"canary-{self._num_asked}",
            max_tokens=self._rng.randint(1, 3),
            ignore_eos=True,
        )
        self._markers[request_id] = self._live[key] if key and is_invoked else None
        if self._rng.random() < 0.03:
            self.engine.core.handle(Abort(request_id))

    def _prompt(self) -> tuple[list[int], bool]:
        """A prompt, and whether adapters act on its end."""
        rng, invocation = self._rng, self._canaries.invocation
        beginning = rng.choice(self._canaries.beginnings)
        others = [rng.choice(self._canaries.tokens) for _ in range(rng.randint(1, 24))]
        prompt = [*beginning, *others]
        if not invocation:
            return prompt, True
        if rng.random() < 0.5:
            return prompt, False
        # Also within what prompts share, so that they share what is behind it too.
        place = rng.choice((len(beginning) // 2, len(beginning), rng.randrange(len(prompt))))
        return [*prompt[:place], *invocation, *prompt[place:]], True

    def _compositions(self) -> list[AdapterKey]:
        return [each for each in self._live if each.members]

    def _judge(self) -> int:
        """How many of the answers that have ended are not their adapter's own."""
        foreign = 0
        for request_id, marker in self._markers.items():
            answer = self.engine.answers.pop(request_id)
            assert answer.finished is not None
            said = set(answer.token_ids) & set(MARKERS)
            is_whole = answer.finished.reason is FinishReason.LENGTH
            has_own = marker is None or set(answer.token_ids) == {marker}
            foreign += bool(said - {marker}) or (is_whole and not has_own)
        self._markers.clear()
        return foreign
