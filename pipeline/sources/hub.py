"""A repository of the Hugging Face hub: downloaded into the hub's own cache, or found there."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pipeline.sources import folder
from pipeline.sources.fetched import Fetched
from runners.errors import UserError

# Copies for other frameworks live in sub-folders; transformers reads the top level.
IGNORED = ["*/*"]


def fetch(repository: str, revision: str | None, *, allow_pickle: bool, trust_remote_code: bool) -> Fetched:
    """Fetch the model files of ``repository`` at ``revision`` (branch, tag or commit; default: the main branch).

    Raises:
        UserError: it cannot be reached or does not exist; and what :func:`folder.fetch` refuses.
    """
    wanted = [*folder.patterns(allow_pickle=allow_pickle, trust_remote_code=trust_remote_code), "README.md"]
    path = _snapshot(repository, revision, wanted)
    # the cache keeps a snapshot under the name of its commit
    return folder.fetch(path, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, revision=path.name)


def _snapshot(repository: str, revision: str | None, wanted: list[str]) -> Path:
    at = f"{repository!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted, ignore_patterns=IGNORED))
    except GatedRepoError as error:
        advice = "accept its terms on its hub page, then log in with 'hf auth login'"
        raise UserError(f"model.source: {at} is gated; {advice}") from error
    except RevisionNotFoundError as error:
        advice = "give a branch, tag or full commit of that repository"
        raise UserError(f"model.revision: {at} does not exist; {advice}") from error
    except RepositoryNotFoundError as error:
        advice = "check the name; a private one needs 'hf auth login'; a local folder is written ./folder"
        raise UserError(f"model.source: the hub has no {at}; {advice}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        advice = "go online, or name a local folder or GGUF file (./path) as model.source"
        raise UserError(f"model.source: the hub cannot be reached and {at} is not in its cache; {advice}") from error
    # the hub's client lets failures of its transport through as they are, and they differ from version to version
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"model.source: fetching {at} from the hub failed: {said}; try again") from error
