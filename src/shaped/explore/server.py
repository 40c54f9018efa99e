"""The HTTP server of the page: on 127.0.0.1 alone, for requests that name it, and from no other site."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shaped.explore.answer import answer
from shaped.explore.fields import Question, Refused, describe_fields, parse_question
from shaped.explore.pool import Pool, WorkerLost

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".png": "image/png"}
"""Files of other kinds are not served."""
LONGEST_QUERY, LARGEST_BODY = 2000, 2**16
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuses requests that are not for this server's own page, before any of them is looked at, and sets the headers of all responses."""

    def __init__(self, app: ASGIApp, port: int):
        self._app = app
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((name.lower().encode(), text.encode()) for name, text in HEADERS.items())]
            await send(message)

        refused = self.check(Request(scope))
        await (refused or self._app)(scope, receive, send_with_headers)

    def check(self, request: Request) -> Response | None:
        """A name of another site that resolves to this address (DNS rebinding) is not served, nor is a form of another site."""
        if request.headers.get("host") not in self._hosts:
            return refuse(421, f"host must be one of {', '.join(sorted(self._hosts))}")
        if request.method not in ("GET", "POST"):
            return refuse(405, "method must be GET or POST")
        if len(request.scope["query_string"]) > LONGEST_QUERY:
            return refuse(414, f"the query must have at most {LONGEST_QUERY} characters")
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
        foreign = origin is not None and origin not in {f"http://{host}" for host in self._hosts}
        if foreign or site not in ("same-origin", "none"):
            return refuse(403, "the request must come from this server's own page")
        return None


def refuse(status: int, error: str, **more: str) -> JSONResponse:
    return JSONResponse({"error": error} | more, status)


class Lines:
    """A response of JSON lines. It ends its work at once when the request is closed, or when the server ends."""

    def __init__(self, lines: AsyncGenerator[dict[str, Any], None], ending: asyncio.Event):
        self._lines, self._ending = lines, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self.send_lines(send))
        others = asyncio.create_task(wait_for_close(receive)), asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((sending, *others), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, *others):
                task.cancel()
            done, *_ = await asyncio.gather(sending, *others, return_exceptions=True)
        if isinstance(done, Exception):
            raise done
        if self._ending.is_set():
            await send({"type": "http.response.body", "body": b""})

    async def send_lines(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]})
        async with aclosing(self._lines) as lines:
            async for line in lines:
                text = json.dumps(line, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
                await send({"type": "http.response.body", "body": f"{text}\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def wait_for_close(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Explorer:
    """The endpoints, and counts of answers."""

    def __init__(self, workers: int):
        self.pool = Pool(workers)
        self.running = self.finished = self.cancelled = 0
        self.ending = asyncio.Event()
        self.files = {path.name: path for path in PAGE.iterdir() if path.suffix in TYPES}

    async def show_file(self, request: Request) -> Response:
        path = self.files.get(request.path_params.get("name", "index.html"))
        return refuse(404, "there is no such page") if path is None else FileResponse(path, media_type=TYPES[path.suffix])

    async def show_fields(self, request: Request) -> Response:
        return JSONResponse({"fields": describe_fields()})

    async def show_answer(self, request: Request) -> Response | Lines:
        try:
            asked = parse_question(request.query_params)
        except Refused as error:
            return refuse(400, str(error), field=error.name)
        return Lines(self.count(asked), self.ending)

    async def read_config(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                return refuse(413, f"a config must have at most {LARGEST_BODY} bytes")
        try:
            text = body.decode()
            async with aclosing(self.pool.run("config", 0, {"text": text})) as lines:
                found = [line async for line in lines]
        except UnicodeDecodeError:
            return refuse(400, "a config must be text in UTF-8")
        except WorkerLost as error:
            return refuse(500, str(error))
        return JSONResponse(found[0], 400 if "error" in found[0] else 200)

    async def count(self, asked: Question) -> AsyncGenerator[dict[str, Any], None]:
        self.running += 1
        finished = False
        try:
            async with aclosing(answer(self.pool, asked)) as lines:
                async for line in lines:
                    finished = finished or line["kind"] in ("done", "error")
                    yield line
        finally:
            self.running -= 1
            self.finished += finished
            self.cancelled += not finished

    async def show_state(self, request: Request) -> Response:
        memory = [find_memory(pid) for pid in (os.getpid(), *self.pool.pids)]
        total = None if None in memory else round(sum(filter(None, memory)) / 2**20, 1)
        counts = {"running": self.running, "finished": self.finished, "cancelled": self.cancelled, "units": self.pool.busy}
        return JSONResponse(counts | {"memory_mb": total})


def find_memory(pid: int) -> int | None:
    """Resident bytes of a process; None where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def make_app(explorer: Explorer, port: int) -> ASGIApp:
    @asynccontextmanager
    async def keep_workers(_: Starlette) -> AsyncIterator[None]:
        await explorer.pool.start()
        try:
            yield
        finally:
            await explorer.pool.stop()

    routes = [
        Route("/", explorer.show_file),
        Route("/fields", explorer.show_fields),
        Route("/answer", explorer.show_answer),
        Route("/config", explorer.read_config, methods=["POST"]),
        Route("/state", explorer.show_state),
        Route("/{name}", explorer.show_file),
    ]
    return Guard(Starlette(routes=routes, lifespan=keep_workers), port)


class Server(uvicorn.Server):
    """Ends the answers under way before it waits for their requests to end."""

    def __init__(self, port: int, workers: int):
        self._explorer = Explorer(workers)
        app = make_app(self._explorer, port)
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1, server_header=False))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._explorer.ending.set()
        await super().shutdown(sockets)
