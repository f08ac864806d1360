"""What the `model` of a request means: the base, a version of an adapter, or several added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...adapters.classification import Classification
from ...adapters.identity import AdapterKey
from ...engine.process.engine import Engine
from ...engine.text.tokenizer import Tokenizer
from ...platform.adapters import registry
from ...platform.adapters.composition import Composition, ResolvedMember
from ...platform.adapters.composition_names import NamedMember, check_members, parse_members
from ...platform.adapters.registry import AdapterRef, Meaning, ModelName
from ...platform.errors import DatabaseUnavailable, ModelNotFound, PlatformError
from ...platform.keys.principal import Principal, Scope
from ..contract.errors import ApiError
from ..control_plane.control_plane import ControlPlane
from .seen_adapters import SeenAdapters
from .version_tokenizers import VersionTokenizers


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the `model` of a request means, from its admission to its end."""

    name: str
    """The pinned name: `tenant/adapter@3`, a composition's, or the base model's."""
    adapter: AdapterRef | None
    """None is the base model. Of a composition the one named first: usage is counted for it."""
    own_tokenizer: Tokenizer | None = None
    """That of an adapter that adds tokens; None: the base's."""
    composition: Composition | None = None
    """None: it is the base model, or one adapter of weight 1."""

    @property
    def key(self) -> AdapterKey | None:
        """The identity of the weights; None is the base model."""
        if self.composition is not None:
            return self.composition.key
        return self.adapter.key if self.adapter else None

    @property
    def adapters(self) -> tuple[AdapterRef, ...]:
        """All adapters that it is made of."""
        if self.composition is not None:
            return tuple(member.adapter for member in self.composition.members)
        return (self.adapter,) if self.adapter else ()

    @property
    def classification(self) -> Classification | None:
        """The meaning of its head's outputs; None: it is no classifier."""
        return self.adapter.classification if self.adapter else None


class ServedModels:
    """Resolves names; one for the server."""

    def __init__(
        self,
        *,
        base_name: str,
        engine: Engine,
        control_plane: ControlPlane,
        seen_adapters: SeenAdapters,
        tokenizers: VersionTokenizers,
    ) -> None:
        """`base_name`: what the base model is called."""
        self._base_name = base_name
        self._engine = engine
        self._control_plane = control_plane
        self._seen_adapters = seen_adapters
        self._tokenizers = tokenizers

    async def resolve(
        self,
        principal: Principal,
        model: str,
        *,
        adapters: Sequence[NamedMember] = (),
        request_id: str = "",
    ) -> ServedModel:
        """What `model`, with `adapters` added to it, means now.

        The base's name is reserved; nothing falls back to the base. Which version of a split alias
        answers depends on `request_id` alone. A name means what it meant up to three seconds ago,
        unless this server has changed something since, and while the database is away what it meant
        last. Raises a PlatformError: unknown, foreign, beyond the key's restriction, not ready, of
        another base, or no composition; ApiError if the key may not compose.
        """
        members = [] if model == self._base_name else parse_members(model)
        members += adapters
        if not members:
            if not principal.may_use(None):
                raise ModelNotFound(model)
            return ServedModel(model, None)
        if len(members) == 1 and members[0].weight == 1.0:
            adapter = await self._version_of(principal, members[0].name, request_id)
            tokenizer = await self._tokenizers.get(adapter.added_tokens)
            return ServedModel(adapter.pinned, adapter, tokenizer)
        return await self._compose(principal, members, request_id)

    async def _compose(
        self, principal: Principal, members: Sequence[NamedMember], request_id: str
    ) -> ServedModel:
        if not principal.can(Scope.ADAPTERS_COMPOSE):
            message = f"Compositions require a key with the scope `{Scope.ADAPTERS_COMPOSE}`."
            raise ApiError("insufficient_scope", message)
        check_members(members)
        composition = Composition(
            tuple(
                [
                    ResolvedMember(await self._version_of(principal, name, request_id), weight)
                    for name, weight in members
                ]
            )
        )
        first = composition.members[0].adapter
        return ServedModel(composition.pinned, first, composition=composition)

    async def _version_of(self, principal: Principal, model: str, request_id: str) -> AdapterRef:
        """The version of one adapter that answers."""
        name = registry.parse_model_name(model)
        if not principal.may_use(name.adapter):
            raise ModelNotFound(model)
        meaning = self._seen_adapters.fresh(principal.tenant_id, model)
        if meaning is None:
            meaning = await self._look_up(principal, name)
        return meaning.of(request_id, base_id=self._engine.info.base_id)

    async def _look_up(self, principal: Principal, name: ModelName) -> Meaning:
        tenant_id = principal.tenant_id
        ticket = self._seen_adapters.begin(tenant_id)
        try:
            meaning = await self._control_plane.read(
                tenant_id,
                lambda session: registry.resolve(session, name, tenant_slug=principal.tenant_slug),
            )
        except DatabaseUnavailable:
            return self._seen_adapters.recall(tenant_id, name.text)
        except PlatformError:
            self._seen_adapters.forget(tenant_id, name.text)
            raise
        if meaning.is_ready:
            self._seen_adapters.note(tenant_id, meaning, ticket)
        else:
            self._seen_adapters.forget(tenant_id, name.text)
        return meaning
