"""What goes wrong with the Hugging Face hub, in one line with the way out."""

import contextlib
from collections.abc import Iterator

TIMEOUT = 10.0
"""Seconds without an answer of the hub."""


def check_cache() -> None:
    """Raises ValueError where the hub's cache would be a folder literally called `~`."""
    from huggingface_hub import constants

    if constants.HF_HUB_CACHE.startswith("~"):
        raise ValueError(
            "the Hugging Face hub needs a folder for its cache, and no home folder is known; set"
            " HF_HOME"
        )


@contextlib.contextmanager
def told_in_a_line(repository: str, doing: str) -> Iterator[None]:
    """Errors of the hub as OSError in one line with the way out; our own pass, and those of the
    disk."""
    check_cache()
    try:
        yield
    except Exception as error:  # the client's error classes differ between its releases
        if type(error) is ValueError or (isinstance(error, OSError) and error.errno is not None):
            raise
        responses = [
            getattr(cause, "response", None)
            for cause in (error, error.__cause__, error.__context__)
        ]
        status = next(
            (response.status_code for response in responses if response is not None), None
        )
        login = "`hf auth login` logs in, or set HF_TOKEN to a token with access to it"
        match status:
            case 401 | 403:
                reason = f"the hub refuses access ({status}); check the name OWNER/NAME; {login}"
            case 404:
                reason = (
                    "the hub has no such repository (404), or hides it; check the name OWNER/NAME;"
                    f" {login}"
                )
            case 429:
                reason = (
                    "the hub accepts no more requests for now (429); give the same command again in"
                    " some minutes"
                )
            case int() if status >= 500:
                reason = f"the hub has a fault ({status}); give the same command again later"
            case _:
                text = " ".join(str(error).split())[:300] or type(error).__name__
                reason = (
                    f"the hub does not answer ({text}); check the network, and give the same"
                    " command again"
                )
                if isinstance(error, ValueError):  # the name of a repository
                    reason = f"{text}; expected OWNER/NAME"
        raise OSError(f"cannot {doing} {repository!r}: {reason}") from error
