"""Files are written whole, with the usual mode, from any thread."""

import os
import stat
from pathlib import Path

import pytest

from shaped.files import set_usual_mode, write_atomically


def test_files_have_the_usual_mode_and_the_umask_is_never_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`os.umask` tells the umask only by setting it: another thread's new file would then be writable by everybody."""
    (tmp_path / "usual").touch()
    monkeypatch.setattr(os, "umask", lambda mode: pytest.fail("the umask was set"))
    write_atomically(tmp_path / "written", lambda file: file.write(b"a"))
    (tmp_path / "private").touch(mode=0o600)
    set_usual_mode(tmp_path / "private")
    assert len({stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["private", "usual", "written"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path):
    def fail(file: object) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(tmp_path / "written", fail)
    assert not list(tmp_path.iterdir())
