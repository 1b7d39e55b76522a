"""Errors of the Hugging Face hub, each as one line with a remedy."""

import contextlib
from collections.abc import Iterator

TIMEOUT = 10.0
"""Maximum seconds to wait for a response of the hub."""


def check_cache() -> None:
    """Raise ValueError if the hub's cache would be a folder with the literal name `~`."""
    from huggingface_hub import constants

    if constants.HF_HUB_CACHE.startswith("~"):
        raise ValueError(
            "the Hugging Face hub needs a folder for its cache, and no home folder is known; set"
            " HF_HOME"
        )


@contextlib.contextmanager
def hub_errors(repository: str, action: str) -> Iterator[None]:
    """Convert errors of the hub to OSError with a message of one line. ValueError and disk errors
    are not converted."""
    check_cache()
    try:
        yield
    except Exception as error:  # the client's error classes differ between its releases
        if type(error) is ValueError or (isinstance(error, OSError) and error.errno is not None):
            raise
        responses = (
            getattr(cause, "response", None)
            for cause in (error, error.__cause__, error.__context__)
        )
        status = next((one.status_code for one in responses if one is not None), None)
        login = "`hf auth login` logs in, or set HF_TOKEN to a token with access to it"
        text = " ".join(str(error).split())[:300] or type(error).__name__
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
            case _ if isinstance(error, ValueError):  # an invalid repository name
                reason = f"{text}; expected OWNER/NAME"
            case _:
                reason = (
                    f"the hub does not answer ({text}); check the network, and give the same"
                    " command again"
                )
        raise OSError(f"cannot {action} {repository!r}: {reason}") from error
