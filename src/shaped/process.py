"""This process: which command it is, Ctrl-C while it loads, processors, memory, how to install an extra, errors in one line. Without torch.

Programs that import the library keep their signal handlers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

INTERRUPTED = 130  # what typer returns after Ctrl-C, as shells do
MESSAGE = "shaped: interrupted; no file is half-written"


def count_cores() -> int:
    """Those of a container or of `taskset`, where the system tells; macOS does not."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that may still be taken before the system kills a process: those that it has available, with its swap, and what is left of the
    limits of containers. None where the system does not tell (macOS).
    """
    try:
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        free = [1024 * sum(int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree") if name in lines or name == "MemAvailable")]
    except (OSError, KeyError, ValueError):
        return None
    with suppress(OSError, ValueError):
        groups = [line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()]
        for controllers, place in groups:
            if controllers == "":
                names, top = ("memory.max", "memory.current", ("inactive_file", "active_file")), root / "sys/fs/cgroup"
            elif "memory" in controllers.split(","):  # version 1
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
                top = root / "sys/fs/cgroup/memory"
            else:
                continue
            own = top / place.strip("/")
            left = (_read_limit(folder, *names) for folder in (own, *own.parents) if folder.is_relative_to(top))
            free += (size for size in left if size is not None)
    return max(0, min(free))


def _read_limit(folder: Path, limit: str, usage: str, cached: tuple[str, ...]) -> int | None:
    """What is left of the limit of a control group. Files that are cached count as used there, but make room."""
    try:
        most, used = ((folder / name).read_text().strip() for name in (limit, usage))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if most == "max" else int(most) - int(used) + sum(int(counts.get(name, 0)) for name in cached)
    except (OSError, ValueError):
        return None


def check_memory(name: str, what: str, needed: float, remedy: str) -> None:
    """Refuses what takes more memory than is free, before the work: Linux kills the process for it, without a word."""
    free = find_free_memory()
    if free is not None and needed > free:
        raise ValueError(
            f"{name} must fit into the {free / 1e9:.3g} GB of memory that are free, got {what} of {needed / 1e9:.3g} GB: {remedy}"
        )


def suggest_install(extra: str) -> str:
    """The command that adds an extra, from where pip installed the package: it is on no registry, so its name alone is not enough."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        source = json.loads(distribution("shaped-transformer").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        source = {}
    url = source.get("url", "")
    if "vcs_info" in source:
        return f"pip install 'shaped-transformer[{extra}] @ {source['vcs_info'].get('vcs', 'git')}+{url}'"
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
    if path is None or not path.exists():
        return f"pip install '.[{extra}]' in a checkout of shaped"
    return f"pip install {'-e ' if source.get('dir_info', {}).get('editable') else ''}'{path}[{extra}]'"


def require(user: str, extra: str, *packages: str) -> None:
    """Refuses work for which packages are missing that the extra brings. `user` is what needs them."""
    missing = [package for package in packages if not find_spec(package)]
    if missing:
        raise ValueError(f"{user} needs {', '.join(missing)} ({suggest_install(extra)})")


def to_line(text: object) -> str:
    """Its text in one line."""
    return " ".join(str(text).split())


def quote_error(error: Exception, most: int | None = 200) -> str:
    """What it says, in one line of at most `most` characters."""
    return to_line(error)[:most]


def is_command() -> bool:
    """Is this process `shaped …` or `python -m shaped …`?"""
    return [Path(name).stem for name in sys.argv[:1]] == ["shaped"] or ("-m", "shaped") in pairwise(sys.orig_argv)


def is_page_server() -> bool:
    """Is this process `shaped explore …`? Then `import shaped` loads nothing: the page's server computes nothing itself."""
    return is_command() and sys.argv[1:2] == ["explore"]


def leave_at_once(*_: Any) -> None:
    # Not an exception: it may be swallowed while a C extension loads, or in a callback.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{MESSAGE}\n".encode())
    os._exit(INTERRUPTED)


def exit_on_interrupt() -> None:
    """Makes Ctrl-C exit at once. There is nothing to clean up yet."""
    ours = is_command() and threading.current_thread() is threading.main_thread()
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)


def restore_interrupts() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, so that running code can clean up."""
    if signal.getsignal(signal.SIGINT) is leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
