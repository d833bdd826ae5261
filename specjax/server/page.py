"""The live page at `/`: plain files that ask this server what it does, and nothing else."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from specjax.server.errors import ApiError
from specjax.server.openapi import add_get

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = {
    file.name: file.read_bytes()
    for file in files("specjax.server").joinpath("page").iterdir()
    if file.name.rpartition(".")[2] in _TYPES
}
_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""No script but the page's own, and none that makes markup of a text: models write what they like.

Nothing is sent elsewhere, and no other page may show this one in a frame.
"""
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> APIRouter:
    """The routes of the page's files; they need no key, but what the page asks for does."""
    router = APIRouter(include_in_schema=False)
    add_get(router, "/", show_page)
    add_get(router, "/page/{name}", show_file)
    return router


async def show_page() -> Response:
    """The page."""
    return _response("index.html")


async def show_file(name: str) -> Response:
    """A file of the page.

    Raises:
      ApiError: there is none of that name (404).
    """
    if name not in _FILES:
        raise ApiError(404, f"There is no {name[:80]!r} in the page.")
    return _response(name)


def _response(name: str) -> Response:
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(_FILES[name], headers=_HEADERS | {"Content-Type": kind})
