"""The server: whom it answers, the order of lines, cancelled questions, and several at once. Its workers are stand-ins without torch."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import httpx
import pytest

from shaped.explore.server import HEADERS, LARGEST_BODY, LONGEST_QUERY, Explorer, make_app
from shaped.explore.units import PANELS

HERE = "http://127.0.0.1:8000"
STAND_IN = (str(Path(__file__).parent / "waiting_worker.py"),)
PAGE = ("/", "/fields", "/state", "/answer?gamma=3", "/nothing", "/../fields.py", "/%2e%2e/fields.py", "/index.html")


@asynccontextmanager
async def serve(workers: int = 0) -> AsyncIterator[tuple[httpx.AsyncClient, Explorer]]:
    explorer = Explorer(workers)
    with mock.patch("shaped.explore.pool.COMMAND", STAND_IN):
        if workers:
            await explorer.pool.start()
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(explorer, 8000)), base_url=HERE) as client:
                yield client, explorer
        finally:
            await explorer.pool.stop()


def ask(method: str, path: str, **options) -> httpx.Response:
    async def go() -> httpx.Response:
        async with serve() as (client, _):
            return await asyncio.wait_for(client.request(method, path, **options), 10)

    return asyncio.run(go())


def test_every_response_has_the_headers():
    for path in PAGE:
        answer = ask("GET", path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert "access-control-allow-origin" not in answer.headers
    assert ask("GET", "/", headers={"host": "evil.example"}).headers["content-security-policy"].startswith("default-src 'none'")


def test_only_files_of_the_page_are_served():
    assert ask("GET", "/").headers["content-type"] == "text/html; charset=utf-8"
    assert ask("GET", "/explore.js").headers["content-type"] == "text/javascript; charset=utf-8"
    for path in ("/nothing", "/../fields.py", "/%2e%2e/fields.py", "/..%2ffields.py", "/page/index.html"):
        assert ask("GET", path).status_code == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1", "127.0.0.1:8001", "localhost:80", ""])
def test_another_name_of_this_machine_is_refused(host):
    answer = ask("GET", "/fields", headers={"host": host})
    assert answer.status_code == 421
    assert answer.json()["error"].startswith("host must be")


def test_its_two_names_are_served():
    for host in ("127.0.0.1:8000", "localhost:8000"):
        assert ask("GET", "/fields", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}],
    ids=lambda headers: "".join(headers.values()),
)
def test_a_request_of_another_site_is_refused(headers):
    for method, path in (("POST", "/config"), ("GET", "/answer")):
        assert ask(method, path, headers=headers).status_code == 403


def test_sizes_and_methods_are_bounded():
    assert ask("GET", "/answer", params={"gamma": "1" * LONGEST_QUERY}).status_code == 414
    assert ask("POST", "/config", content=b"x" * (LARGEST_BODY + 1)).status_code == 413
    assert ask("POST", "/config", content=b"\xff").status_code == 400
    for method in ("PUT", "DELETE", "OPTIONS", "HEAD"):
        assert ask(method, "/").status_code == 405
    assert ask("GET", "/config").status_code in (404, 405)


def test_a_bad_question_names_its_field():
    answer = ask("GET", "/answer", params={"gamma": "3"})
    assert answer.status_code == 400
    assert answer.json() == {"error": "gamma must be from 0.01 to 1, got 3", "field": "gamma"}


def run_with(workers: int, work: Callable[[httpx.AsyncClient, Explorer], Awaitable[None]]) -> None:
    async def go() -> None:
        async with serve(workers) as (client, explorer):
            await asyncio.wait_for(work(client, explorer), 30)

    asyncio.run(go())


async def read_lines(client: httpx.AsyncClient, **values: str) -> list[dict]:
    answer = await client.get("/answer", params=values)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_lines_come_in_order():
    async def work(client, explorer):
        lines = await read_lines(client, width="16", depth="6", qk_norm="true")
        assert [line["kind"] for line in lines] == ["question", *["panel"] * (len(lines) - 2), "done"]
        assert lines[0]["values"]["qk_norm"] is True
        assert lines[0]["values"]["tokens"] == 4
        assert "n, d, seed = 16, 6, 0" in lines[0]["python"]
        assert lines[0]["command"].startswith("shaped simulate --width 16 ")
        stages = [line["stage"] for line in lines[1:-1]]
        assert sorted(line["panel"] for line in lines[1 : 1 + len(PANELS)]) == sorted(PANELS)
        assert stages == sorted(stages)
        assert lines[-1]["seconds"] >= 0

    run_with(2, work)


def test_two_pages_at_once_have_their_own_answers():
    async def work(client, explorer):
        one, other = await asyncio.gather(read_lines(client, seed="1"), read_lines(client, seed="2"))
        assert [lines[0]["values"]["seed"] for lines in (one, other)] == [1, 2]
        assert len(one) == len(other)
        state = (await client.get("/state")).json()
        assert (state["running"], state["finished"], state["cancelled"], state["units"]) == (0, 2, 0, 0)

    run_with(1, work)


def test_cancelled_questions_leave_nothing():
    """A hundred, at every moment of an answer that never ends by itself; then a plain one has its answer."""

    async def work(client, explorer):
        app = make_app(explorer, 8000)
        for number in range(100):
            await ask_and_close(app, b"gamma=0.5", after=number % 16)
        assert explorer.running == 0
        while explorer.pool.busy:
            await asyncio.sleep(0.01)
        assert explorer.cancelled == 100
        assert (await read_lines(client))[-1]["kind"] == "done"
        assert len(asyncio.all_tasks()) <= 2 + 2 * 2  # this one and its timeout; of each worker its reader and its pipe
        assert all(not worker.queues for worker in explorer.pool._workers)

    run_with(2, work)


async def ask_and_close(app, query: bytes, after: int) -> None:
    """A request that is closed after so many lines."""
    seen, closed = 0, asyncio.Event()

    async def receive() -> dict:
        await closed.wait()
        return {"type": "http.disconnect"}

    async def send(message) -> None:
        nonlocal seen
        seen += 1
        if seen > after:
            closed.set()

    scope = {"type": "http", "method": "GET", "path": "/answer", "query_string": query, "headers": [(b"host", b"127.0.0.1:8000")]}
    asyncio.get_running_loop().call_later(0.5, closed.set)
    await app(scope, receive, send)


def test_a_preview_does_not_wait_for_another_pages_fine_answer():
    async def work(client, explorer):
        app = make_app(explorer, 8000)
        endless = asyncio.create_task(ask_and_close(app, b"gamma=0.5", after=10**6))
        while 1 not in explorer.pool._workers[0].stages.values():
            await asyncio.sleep(0.01)
        answer = await asyncio.wait_for(first_lines(client, len(PANELS) + 1), 5)
        assert {line.get("stage", 0) for line in answer} == {0}
        assert not endless.done()
        await endless

    async def first_lines(client, count):
        """httpx's stand-in for a network gives the whole answer at once, so this one closes after so many lines."""
        seen: list[dict] = []
        closed = asyncio.Event()

        async def receive() -> dict:
            await closed.wait()
            return {"type": "http.disconnect"}

        async def send(message) -> None:
            seen.extend(json.loads(line) for line in message.get("body", b"").splitlines())
            if len(seen) >= count:
                closed.set()

        scope = {"type": "http", "method": "GET", "path": "/answer", "query_string": b"seed=1", "headers": [(b"host", b"127.0.0.1:8000")]}
        await client._transport.app(scope, receive, send)
        return seen[:count]

    run_with(1, work)


def test_a_lost_worker_is_one_error_and_is_replaced():
    async def work(client, explorer):
        lines = await read_lines(client, gamma="0.25")
        assert lines[-1]["kind"] == "error"
        assert "ended" in lines[-1]["error"]
        assert (await read_lines(client))[-1]["kind"] == "done"

    run_with(1, work)


def test_workers_that_do_not_start_are_an_error_each_time_until_one_does():
    async def work(client, explorer):
        with mock.patch("shaped.explore.pool.COMMAND", ("-c", "raise SystemExit(1)")):
            lines = await read_lines(client, gamma="0.25")  # the worker that ran ends, and none comes after it
            assert "ended" in lines[-1]["error"]
            for _ in range(2):
                lines = await read_lines(client)
                assert lines[-1]["error"].startswith("the process that computes does not start")
        assert (await read_lines(client))[-1]["kind"] == "done"

    run_with(1, work)


def test_any_other_error_ends_its_own_answer_alone():
    async def work(client, explorer):
        with mock.patch.object(explorer.pool, "_take", side_effect=BrokenPipeError("the pipe is closed")):
            *_, last = await read_lines(client)
        assert last == {"kind": "error", "error": "BrokenPipeError: the pipe is closed"}
        assert (await read_lines(client))[-1]["kind"] == "done"

    run_with(1, work)


def test_an_answer_ends_when_the_server_ends():
    async def work(client, explorer):
        asyncio.get_running_loop().call_later(0.3, explorer.ending.set)
        lines = await read_lines(client, gamma="0.5")
        assert lines[-1]["kind"] == "panel"
        assert explorer.running == 0

    run_with(1, work)
