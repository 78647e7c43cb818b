"""What `push` and `pull` ask of the hub, with its errors in words. The token is found, and sent, by
huggingface_hub alone.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from mlxstacks.errors import InputError

# the HTTP library differs between versions of the hub client; its base error is here in all
_HTTP_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def check_repo(repo_id: str | None) -> str:
    """Raises: InputError for what is no id of a repository."""
    if repo_id is None or not _REPO.fullmatch(repo_id) or ".." in repo_id:
        raise InputError(f"repo_id: got {str(repo_id)[:200]!a}; give one as in name/my-adapter")
    return repo_id


@contextmanager
def asking(repo_id: str) -> Iterator[HfApi]:
    """An `HfApi`. Raises: InputError for whatever goes wrong with the hub in the block."""
    try:
        yield HfApi(library_name="mlxstacks")
    except InputError:
        raise
    except RepositoryNotFoundError:
        line = "there is no such repository for this user"
    # RuntimeError: of the transfer of large files
    except (_HTTP_ERROR, OSError, ValueError, RuntimeError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        line = f"the hub refused or was not reached: {line:.300}"
    else:
        return
    raise InputError(f"{repo_id}: {line}; to log in: `hf auth login`")
