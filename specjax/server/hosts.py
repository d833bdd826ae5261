"""Which names a server answers to, and which origins' pages may read what it answers."""

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.server.errors import ApiError, respond_to_api_error
from specjax.server.options import ServerOptions

ANY = "*"
_SHOWN = 80
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{0,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-fA-F:.]+\]|[^/?#\s@:\[\]]+)(:[0-9]{1,5})?")


class HostCheck:
    """Refuses requests whose Host header names another server, or that have not exactly one.

    A page on the web can let a name of its own point at this machine (DNS rebinding); its browser
    then takes what the server answers for the page's own. A server on a loopback address that asks
    for no key is therefore asked by localhost's names only, and by those of `allowed_hosts`.

    Args:
      app: what answers.
      options: where the server listens, its keys and hosts.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._hosts = {each.lower() for each in options.allowed_hosts}
        open_to_pages = _is_loopback(options.host) and not options.api_keys
        self._any = ANY in self._hosts or not (self._hosts or open_to_pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or refuses with 400 or 403."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await respond_to_api_error(HTTPConnection(scope), refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        found = Headers(scope=scope).getlist("host")
        if not found and self._any and scope["http_version"] == "1.0":  # which load balancers speak
            return None
        if len(found) != 1:
            return ApiError(400, f"A request has one Host header; this one has {len(found)}.")
        matched = _HOST.fullmatch(found[0])
        if matched is None:
            return ApiError(400, f"The Host header {found[0][:_SHOWN]!r} names no host.")
        name = matched[1].lower()
        if self._any or name in self._hosts or _is_loopback(name):
            return None
        shown = f"The Host header names {name[:_SHOWN]!r}, which is none of this server's hosts"
        return ApiError(403, f"{shown}; --allowed-hosts adds some.", code="host_not_allowed")


def _is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own to itself."""
    name = host.strip("[]").rstrip(".")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def check_hosts(hosts: Sequence[str]) -> None:
    """Refuses what is no host's name.

    Raises:
      ValueError: one has a scheme, a port or a path, or is empty.
    """
    for host in hosts:
        matched = _HOST.fullmatch(host)
        if host != ANY and (matched is None or matched[1] != host):
            raise ValueError(
                f"--allowed-hosts has {host!r}; it must be *, or names or addresses without a "
                "scheme, port or path, such as models.example."
            )


def check_origins(origins: Sequence[str]) -> None:
    """Refuses what is no origin as browsers send it.

    Raises:
      ValueError: one has no scheme, or a path, or is empty.
    """
    for origin in origins:
        if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"--allowed-origins has {origin!r}; it must be *, or origins such as "
                "https://app.example or http://localhost:3000, without a path."
            )
