"""How many processors this process may use. Without torch: the page's server asks too."""

from __future__ import annotations

import os


def count_cores() -> int:
    """Those of a container or of `taskset`, where the system tells; macOS does not."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
