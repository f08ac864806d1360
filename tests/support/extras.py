"""What an extra of the package brings, by the metadata of what is installed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(requirements: Iterable[str], extra: str = "") -> Iterator[Requirement]:
    """The requirements that hold on this machine, with the extra's."""
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": extra}):
            yield requirement


def brought(requirements: Iterable[str], extra: str = "") -> dict[str, Distribution]:
    """Canonical names and distributions of all that these requirements bring here, in any number
    of steps.

    Raises PackageNotFoundError for one that is not installed, and AssertionError for one that is
    installed in a version that is not admitted.
    """
    found: dict[str, Distribution] = {}
    waiting = list(required(requirements, extra))
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        installed = distribution(requirement.name)
        assert requirement.specifier.contains(installed.version, prereleases=True), (
            f"{requirement} admits no {installed.version}"
        )
        found[name] = installed
        for one in {"", *requirement.extras} - {known for key, known in seen if key == name}:
            seen.add((name, one))
            waiting += required(installed.requires or (), one)
    return found
