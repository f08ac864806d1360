"""Grammars for tests: random schemas, and an automaton whose language is a Python function."""

from __future__ import annotations

import ctypes
import importlib.util
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from loraplex.engine.grammars.matcher import Automaton


def has_llguidance() -> bool:
    return importlib.util.find_spec("llguidance") is not None


needs_llguidance = pytest.mark.skipif(not has_llguidance(), reason="llguidance is not installed")

Schema = dict[str, Any]


def random_schema(seed: int) -> Schema:
    """One whose every value is short, so that a model that knows nothing comes to an end."""
    rng = random.Random(seed)
    return _object(rng, 2) if rng.random() < 0.8 else _value(rng, 2)


def _value(rng: random.Random, depth: int) -> Schema:
    simple: list[Callable[[random.Random], Schema]] = [_string, _integer, _number, _enum, _pattern]
    simple += [lambda _: {"type": "boolean"}, lambda _: {"type": "null"}, _format, _const]
    if depth and rng.random() < 0.5:
        return rng.choice([_object, _array, _tuple, _any_of])(rng, depth - 1)
    return rng.choice(simple)(rng)


def _object(rng: random.Random, depth: int) -> Schema:
    names = [rng.choice(["name", "Größe", "a b", 'q"uote', "n\n", "x1"]) + str(i) for i in range(3)]
    properties = {name: _value(rng, depth) for name in names[: rng.randint(0, 3)]}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _value(rng, depth),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_value(rng, depth) for _ in range(2)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth), _value(rng, depth)]}


def _string(rng: random.Random) -> Schema:
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice([r"^[a-f]{1,4}$", r"^(foo|bar)-\d{2}$"])}


def _format(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random) -> Schema:
    return {"type": "integer", "multipleOf": rng.choice([2, 5]), "minimum": 0, "maximum": 100}


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample(["red", "grün", 'say "hi"', 7, None, True], k=3)}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice(["<|end|>", "x y", 0])}


class ScriptedAutomaton:
    """Follows the outputs for whose beginnings `allowed` gives what may come next.

    `breaks_behind`: how many tokens it takes before it fails, as the library does beyond its
    limits; `raises`: it raises then instead, which the library never should.
    """

    def __init__(
        self,
        allowed: Callable[[Sequence[int]], Collection[int]],
        *,
        breaks_behind: int | None = None,
        raises: bool = False,
    ) -> None:
        self.taken: list[int] = []
        self._allowed = allowed
        self._breaks_behind = breaks_behind
        self._raises = raises
        self._is_broken = False

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        return self.try_consume_tokens(sampled_tokens) == len(sampled_tokens)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        num_valid = self.validate_tokens(tokens)
        self.taken += tokens[:num_valid]
        return num_valid

    def validate_tokens(self, tokens: list[int]) -> int:
        for index, token in enumerate(tokens):
            if token not in self._allowed([*self.taken, *tokens[:index]]):
                return index
        return len(tokens)

    def rollback(self, num_tokens: int) -> bool:
        del self.taken[len(self.taken) - num_tokens :]
        return True

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        if self._breaks_behind is not None and len(self.taken) >= self._breaks_behind:
            if self._raises:
                raise RuntimeError("the automaton is broken")
            self._is_broken = True
        mask = bytearray(trg_byte_size)
        for token in self._allowed(self.taken):
            mask[token // 8] |= 1 << token % 8
        ctypes.memmove(trg_pointer, bytes(mask), trg_byte_size)

    def is_stopped(self) -> bool:
        return self._is_broken or not self._allowed(self.taken)

    def is_error(self) -> bool:
        return self._is_broken

    def deep_copy(self) -> ScriptedAutomaton:
        copy = ScriptedAutomaton(
            self._allowed, breaks_behind=self._breaks_behind, raises=self._raises
        )
        copy.taken = list(self.taken)
        return copy


class SequentialExecutor:
    """One mask after another."""

    def unsafe_compute_mask_ptr(
        self,
        interpreters: list[tuple[Automaton, int]],
        trg_pointer: int,
        one_mask_bytes: int,
        trg_batch_size: int,
    ) -> None:
        for automaton, row in interpreters:
            assert row < trg_batch_size
            automaton.unsafe_compute_mask_ptr(trg_pointer + row * one_mask_bytes, one_mask_bytes)
