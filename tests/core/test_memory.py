"""How much memory is free, as the system and the limits of containers say."""

from pathlib import Path

import pytest

from refusals import refused
from shaped import process
from shaped.process import check_memory, find_free_memory


def write(root: Path, place: str, **files: object) -> None:
    for name, content in files.items():
        path = root / place / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def test_the_narrowest_limit_counts(tmp_path: Path):
    assert find_free_memory(tmp_path) is None
    write(tmp_path, "proc", meminfo="MemTotal:       100 kB\nMemAvailable:   30 kB\nSwapFree: 20 kB")
    assert find_free_memory(tmp_path) == 50 * 1024
    write(tmp_path, "proc/self", cgroup="3:cpu:/jobs\n0::/jobs/one")
    assert find_free_memory(tmp_path) == 50 * 1024  # a container that does not show its groups
    write(tmp_path, "sys/fs/cgroup/jobs/one", memory__max="max", memory__current=7, memory__stat="anon 1\ninactive_file 2")
    assert find_free_memory(tmp_path) == 50 * 1024
    write(tmp_path, "sys/fs/cgroup/jobs", memory__max=4000, memory__current=1000, memory__stat="anon 1\ninactive_file 150\nactive_file 50")
    assert find_free_memory(tmp_path) == 3200
    write(tmp_path, "sys/fs/cgroup/jobs", memory__max=4000, memory__current=4000, memory__stat="anon 1")
    assert find_free_memory(tmp_path) == 0


def test_groups_of_the_first_version_count_too(tmp_path: Path):
    write(tmp_path, "proc", meminfo="MemAvailable:   50 kB")
    write(tmp_path, "proc/self", cgroup="4:memory:/job")
    names = {"memory__limit_in_bytes": 1000, "memory__usage_in_bytes": 1200, "memory__stat": "total_inactive_file 100"}
    write(tmp_path, "sys/fs/cgroup/memory/job", **names)
    assert find_free_memory(tmp_path) == 0


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch):
    check_memory("model", "weights", 1.0, "fewer")
    monkeypatch.setattr(process, "find_free_memory", lambda: 2_000_000_000)
    with refused("model must fit into the 2 GB of memory", "got weights of 3 GB", "fewer layers"):
        check_memory("model", "weights", 3e9, "fewer layers")
    monkeypatch.setattr(process, "find_free_memory", lambda: None)
    check_memory("model", "weights", 3e30, "fewer")
