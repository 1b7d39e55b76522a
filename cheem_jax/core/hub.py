"""Convert errors of the Hugging Face hub to messages of one line that state a remedy."""

import contextlib
from collections.abc import Iterator

TIMEOUT = 10.0
"""Maximum number of seconds to wait for a response of the hub."""


def check_cache() -> None:
    """Raise ValueError if the hub's cache would be a folder that is literally named `~`."""
    from huggingface_hub import constants

    if constants.HF_HUB_CACHE.startswith("~"):
        raise ValueError(
            "the Hugging Face hub needs a folder for its cache, but the home folder is unknown; set"
            " HF_HOME"
        )


@contextlib.contextmanager
def hub_errors(repository: str, action: str) -> Iterator[None]:
    """Convert errors of the hub to OSError with a message of one line. Two kinds of errors are
    raised unchanged: disk errors, and errors whose class is exactly ValueError, not a subclass."""
    check_cache()
    try:
        yield
    except Exception as error:  # error classes differ between releases of the client
        if type(error) is ValueError or (isinstance(error, OSError) and error.errno is not None):
            raise
        responses = (
            getattr(cause, "response", None)
            for cause in (error, error.__cause__, error.__context__)
        )
        status = next((r.status_code for r in responses if r is not None), None)
        login = "`hf auth login` logs in, or set HF_TOKEN to a token with access to it"
        text = " ".join(str(error).split())[:300] or type(error).__name__
        match status:
            case 401 | 403:
                reason = f"the hub refuses access ({status}); check the name OWNER/NAME; {login}"
            case 404:
                reason = (
                    "the repository does not exist or is private (404); check the name OWNER/NAME;"
                    f" {login}"
                )
            case 429:
                reason = (
                    "the hub accepts no more requests at present (429); repeat the command in some"
                    " minutes"
                )
            case int() if status >= 500:
                reason = f"the hub reports an internal error ({status}); repeat the command later"
            case _ if isinstance(error, ValueError):  # an invalid repository name
                reason = f"{text}; expected OWNER/NAME"
            case _:
                reason = (
                    f"the hub does not answer ({text}); check the network, and repeat the command"
                )
        raise OSError(f"cannot {action} {repository!r}: {reason}") from error
