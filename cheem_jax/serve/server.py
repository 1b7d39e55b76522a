"""The application behind a socket, until a signal ends it."""

import ipaddress
import math
import os
import socket

import uvicorn
from starlette.applications import Starlette

from cheem_jax.serve.limits import Limits

MORE_CONNECTIONS = 512
"""Connections beyond the pictures that may wait: idle ones, and those that are about to be refused."""
MAX_HEAD = 2**15
"""Bytes of a request's head."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, on a free port where `port` is 0; ValueError where that cannot be."""
    if not 0 <= port <= 65535:  # the system would take it modulo 65536
        raise ValueError(f"port is {port}, expected 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        # Python adds the address to the words of some errors
        number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
        reason = os.strerror(number) if number else getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot listen on {host}:{port} ({reason}); name another with --host and --port (0: any free port)"
        ) from error


def address_of(listening: socket.socket) -> str:
    """The page's address."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def hosts_of(listening: socket.socket, host: str) -> tuple[str, ...]:
    """Names by which this server may be asked: its own where only this machine reaches it, else any."""
    bound = listening.getsockname()[0]
    if not ipaddress.ip_address(bound.partition("%")[0]).is_loopback:
        return ("*",)
    return tuple({host, f"[{bound}]" if ":" in bound else bound, "localhost", "127.0.0.1", "[::1]"})


def make_server(app: Starlette, limits: Limits) -> uvicorn.Server:
    """A server of one process; after a signal its `run(sockets=[...])` ends with the running requests."""
    patience = math.ceil(limits.timeout_seconds)
    return uvicorn.Server(
        uvicorn.Config(
            app, loop="asyncio", http="h11", ws="none", lifespan="on", log_config=None, log_level="error",
            access_log=False, proxy_headers=False, server_header=False, h11_max_incomplete_event_size=MAX_HEAD,
            limit_concurrency=limits.max_queue + MORE_CONNECTIONS, timeout_keep_alive=patience,
            timeout_graceful_shutdown=patience + 1,
        )
    )  # fmt: skip
