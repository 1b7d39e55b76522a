"""The page in the browser: one file, with headers that let it load and send nothing elsewhere."""

import base64
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from cheem_jax.core.ops import COLOURS

TEMPLATE = Path(__file__).with_name("page.html")


class Page(NamedTuple):
    """HTML and the headers that it is sent with."""

    html: bytes
    headers: dict[str, str]


def page() -> Page:
    """The page; what it shows of a memory it asks for under `/memory`."""
    colours = " ".join(f"--{kind}: {colour};" for kind, colour in COLOURS.items())
    html = TEMPLATE.read_text().replace("/* colours of the ops */", colours)
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script", html),
        "style-src": _hash_of("style", html),
        "connect-src": "'self'",
        "img-src": "blob: data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
    }
    return Page(html.encode(), headers)


def _hash_of(element: str, html: str) -> str:
    """How a policy names the one script or style that may be there."""
    [text] = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
