"""Files are written whole, with the usual mode, from any thread."""

import math
import os
import resource
import stat
from pathlib import Path

import pytest

from shaped.files import append_lines, read_json_lines, read_steps, replace_non_finite, set_usual_mode, write_atomically


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


def test_ctrl_c_after_the_last_step_of_a_write_is_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replace = os.replace

    def replace_and_interrupt(source: Path, target: Path) -> None:
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "written", lambda file: file.write(b"a"))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"a"]


def test_json_lines_end_at_the_first_that_cannot_be_read(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    assert read_steps(path) == []
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert read_steps(path) == [{"step": 0}, {"step": 1}]
    for wrong in ('{"step": true}', '{"step": "1"}', "[1]", '{"step": 1, "loss": NaN}', ""):
        path.write_text(f'{{"step": 0}}\n{wrong}\n{{"step": 2}}\n')
        assert read_steps(path) == [{"step": 0}]
    path.write_text("1\na\n3\n")
    lines, wrong = read_json_lines(path, lambda text: {"number": int(text)})
    assert lines == [{"number": 1}, {"number": 3}]
    assert list(wrong) == [2]


def test_a_line_that_the_disk_has_no_room_for_leaves_nothing(tmp_path: Path):
    """A full disk takes a part of it. The next line had been glued to that part."""
    path = tmp_path / "rows.jsonl"
    append_lines(path, [{"step": 0}])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))  # Python ignores the signal of this limit
    try:
        with pytest.raises(OSError, match=r"too large.*rows\.jsonl"):
            append_lines(path, [{"step": 1}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_lines(path, [{"step": 2}, {"step": 3}])
    assert path.read_text() == '{"step": 0}\n{"step": 2}\n{"step": 3}\n'


def test_an_error_of_a_write_names_the_file(tmp_path: Path):
    """On a full disk the command had said no more than that no space is left."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too large.*result\.json"):
            write_atomically(tmp_path / "result.json", lambda file: file.write(b"0123456789"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match=r"^what transformers says$"):
        write_atomically(tmp_path / "result.json", lambda file: (_ for _ in ()).throw(OSError("what transformers says")))


def test_numbers_that_json_lacks_become_none():
    assert replace_non_finite({"a": (1.0, math.inf), "b": [{"c": -math.inf}], "d": math.nan, "e": "nan", "f": True}) == {
        "a": [1.0, None],
        "b": [{"c": None}],
        "d": None,
        "e": "nan",
        "f": True,
    }
