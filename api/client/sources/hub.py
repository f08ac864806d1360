"""An adapter in a repository of the Hugging Face Hub.

It is read with the caller's credentials, as huggingface_hub finds them: HF_TOKEN, or the login of
`hf auth login`. HF_ENDPOINT chooses another hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..errors import InvalidArgument, NotFound, SourceDenied, SourceUnavailable
from ..progress import Progress
from .listing import Listing, did_you_mean

SCHEME = "hf"


@dataclass(frozen=True, slots=True)
class HubFolder:
    """A folder of a repository at a revision; the default one if it is None."""

    repository: str
    revision: str | None
    folder: str

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}://{self.repository}{revision}/{self.folder}".rstrip("/")


def parse_hub_folder(address: str) -> HubFolder:
    """Take `hf://OWNER/NAME[@REVISION][/FOLDER]` apart; a slash in a revision is `%2F`.

    Raises InvalidArgument.
    """
    owner, _, rest = address.removeprefix(f"{SCHEME}://").partition("/")
    named, _, folder = rest.partition("/")
    name, has_revision, revision = named.partition("@")
    if not owner or not name or "@" in owner or (has_revision and not revision):
        raise InvalidArgument(
            f"{address!r} is not an address in the Hugging Face Hub. Use "
            "hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://OWNER/NAME/FOLDER."
        )
    return HubFolder(f"{owner}/{name}", unquote(revision) or None, folder.strip("/"))


def download(wanted: HubFolder, directory: Path, progress: Progress) -> Path:
    """Download the adapter's files; the folder that has them. Raises ClientError."""
    from huggingface_hub import HfApi, hf_hub_download

    hub = HfApi()
    with _reaching(hub, wanted):
        repository = hub.model_info(wanted.repository, revision=wanted.revision)
    paths = {file.rfilename for file in repository.siblings or ()}
    listing = Listing(
        paths, lambda folder: str(HubFolder(wanted.repository, wanted.revision, folder))
    )
    folder = listing.choose(wanted.folder)
    for path in listing.files_of(folder):
        progress.note(f"Downloading {path} of {wanted.repository}.")
        with _reaching(hub, wanted):  # all files of one commit, whatever is pushed meanwhile
            hf_hub_download(
                wanted.repository,
                path,
                revision=repository.sha,
                local_dir=directory,
            )
    return directory / folder


@contextmanager
def _reaching(hub: Any, wanted: HubFolder) -> Iterator[None]:
    """Convert the library's errors; its transport's classes differ between releases."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = wanted.repository
    try:
        yield
    except GatedRepoError as exc:
        raise SourceDenied(
            f"{name} is gated: accept its terms on its page, and set HF_TOKEN to your token."
        ) from exc
    except RepositoryNotFoundError as exc:
        missing = NotFound(
            f"Not found in the Hugging Face Hub: {name}. If it is private, set HF_TOKEN"
        )
        raise did_you_mean(missing, name, _repositories(hub, name)) from exc
    except RevisionNotFoundError as exc:
        missing = NotFound(f"{name} has no revision {wanted.revision!r}")
        raise did_you_mean(missing, str(wanted.revision), _revisions(hub, name)) from exc
    except HFValidationError as exc:
        raise InvalidArgument(f"{name!r} is not a name in the Hugging Face Hub: {exc}") from exc
    except HfHubHTTPError as exc:
        status = exc.response.status_code
        kind = SourceDenied if status in (401, 403) else SourceUnavailable
        raise kind(f"The Hugging Face Hub refused {name} with status {status}.") from exc
    except Exception as exc:
        raise SourceUnavailable(f"{name} could not be read from the Hub: {exc}") from exc


def _repositories(hub: Any, name: str) -> list[str]:
    """The other repositories of its owner; none if they cannot be listed."""
    try:
        return [found.id for found in hub.list_models(author=name.partition("/")[0], limit=100)]
    except Exception:  # only a hint is missing
        return []


def _revisions(hub: Any, name: str) -> list[str]:
    try:
        refs = hub.list_repo_refs(name)
    except Exception:  # only a hint is missing
        return []
    return [ref.name for ref in (*refs.branches, *refs.tags)]
