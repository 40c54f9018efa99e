"""Mutation testing: changes the package in one place at a time and counts how many of the changes some test notices.

    python benchmarks/mutation/mutations.py                      # every mutant of layers/, limit.py, finite.py and nn/functional.py
    python benchmarks/mutation/mutations.py --count 100 --seed 1 # a random sample
    python benchmarks/mutation/mutations.py --files src/shaped/covariance.py --tests tests/core/test_covariance.py --out out/covariance.json

One run of the unchanged package measures each test: its CPU time, and the functions that it calls. A mutant then runs the tests that call
the changed function, the fastest first, until one fails. Tests longer than `--longest` are left out, mostly the statistical ones,
so the share killed is a lower bound.
A child is forked for each mutant: torch is imported once, and the working tree is never written to.
An interrupted run goes on where it was: finished mutants are in out/mutations.json. When the tests change, survivors are tried again.
benchmarks/mutation/equivalent_mutants.toml lists mutants that compute the same, each with its reason: they are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
from mutants import Mutant, find_unknown, make_mutants

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shaped"
FILES = ["src/shaped/layers", "src/shaped/limit.py", "src/shaped/finite.py", "src/shaped/nn/functional.py", "src/shaped/nn/activations"]
TESTS = [
    "tests/layers",
    "tests/core/test_limit.py",
    "tests/core/test_finite.py",
    "tests/core/test_stepping.py",
    "tests/core/test_errors.py",
    "tests/core/test_runs.py",
    "tests/nn/test_functional.py",
    "tests/nn/test_modules.py",
]
EQUIVALENT = ROOT / "benchmarks" / "mutation" / "equivalent_mutants.toml"
STATE = ROOT / "out" / "mutations.json"
Tests = dict[str, dict[str, Any]]  # by id: seconds, and the functions reached, as "file: qualified name"


def main() -> None:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `fork` ends its child
    preload()
    files = [path for name in options.files for path in (sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / name])]
    every = [mutant for path in files for mutant in make_mutants(str(path.relative_to(PACKAGE)), path.read_text())]
    equivalent = tomllib.loads(EQUIVALENT.read_text())
    if unknown := find_unknown(equivalent, PACKAGE):
        sys.exit(f"{EQUIVALENT.name} must list mutants that exist, got {unknown[0]!r}")
    sample = random.Random(options.seed).sample(every, min(options.count or len(every), len(every)))
    chosen = [mutant for mutant in sample if mutant.name not in equivalent]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "shaped"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        state = State(options.tests, options.longest)
        if changed := state.unmeasured():
            print("measuring the tests of", *changed, flush=True)
            measured = fork(lambda: measure(copy, changed, files, options.longest), cpu=3600, wall=3600)
            if not measured:
                sys.exit("tests must pass on the unchanged package, got none that does")
            state.add_tests(measured)
        results = [test(mutant, copy, state, options) for mutant in announce(chosen, state)]
    killed = sum(result["killed"] for result in results)
    write_report(options, chosen, results, {"mutants": len(every), "equivalent": len(sample) - len(chosen), "tests": len(state.tests)})
    if killed < options.least * len(chosen):
        sys.exit(f"share killed must be at least {options.least:g}, got {killed / len(chosen):.3f}: see the survivors above")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", nargs="+", default=FILES, help="files or folders to change")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders of the tests to run")
    parser.add_argument("--count", type=int, help="size of a random sample (default: every mutant)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--longest", type=float, default=0.6, help="CPU seconds of the longest test that is run")
    parser.add_argument("--budget", type=float, default=20.0, help="CPU seconds of tests for one mutant")
    parser.add_argument("--new", nargs="+", default=[], help="files of tests to run last; the report says how many mutants only they kill")
    parser.add_argument("--least", type=float, default=0.0, help="exit with 1 if a smaller share is killed")
    parser.add_argument("--out", default=str(ROOT / "docs" / "results" / "mutations.json"))
    return parser.parse_args()


def preload() -> None:
    """Imports what the tests need except `shaped` itself, so that children do not have to."""
    import beartype.claw  # noqa: F401
    import hypothesis.strategies  # noqa: F401
    import jaxtyping  # noqa: F401
    import scipy.linalg
    import scipy.stats  # noqa: F401
    import torch

    torch.set_num_threads(1)


class State:
    """What is known so far: the measured tests and the finished mutants. Kept on disk."""

    def __init__(self, tests: list[str], longest: float):
        every = [path for name in tests for path in (sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / name])]
        shared = [path.read_bytes() for path in sorted((ROOT / "tests").rglob("*.py")) if not path.name.startswith("test_")]
        self.of_files = {str(path.relative_to(PACKAGE)): digest([path.read_bytes()]) for path in sorted(PACKAGE.rglob("*.py"))}
        around = [*shared, repr((longest, self.of_files)).encode()]
        self.of_tests = {
            str(path.relative_to(ROOT)): digest([path.read_bytes(), *around]) for path in every if path.name.startswith("test_")
        }
        kept = json.loads(STATE.read_text()) if STATE.exists() else {"done": {}, "tests": {}, "measured": {}}
        self.done: dict[str, dict[str, Any]] = kept["done"]
        self.measured = {file: of for file, of in kept["measured"].items() if self.of_tests.get(file) == of}
        self.tests: Tests = {id: about for id, about in kept["tests"].items() if id.partition("::")[0] in self.measured}

    def unmeasured(self) -> list[str]:
        """The files of tests that are new, or changed since they were measured."""
        return [file for file in self.of_tests if file not in self.measured]

    def add_tests(self, measured: Tests) -> None:
        self.tests |= measured
        self.measured = dict(self.of_tests)
        self.save()

    def get(self, mutant: Mutant) -> dict[str, Any] | None:
        """The result for a mutant, if its file did not change since, and for a survivor if the tests did not."""
        known = self.done.get(mutant.name)
        fresh = known and known["file"] == self.of_files[mutant.file] and (known["killed"] or known["tests"] == self.known_tests())
        return known if fresh else None

    def put(self, mutant: Mutant, result: dict[str, Any]) -> dict[str, Any]:
        self.done[mutant.name] = result | {"file": self.of_files[mutant.file], "tests": self.known_tests()}
        self.save()
        return self.done[mutant.name]

    def known_tests(self) -> str:
        return digest(map(str.encode, self.of_tests.values()))

    def save(self) -> None:
        STATE.parent.mkdir(exist_ok=True)
        part = STATE.with_suffix(".part")
        part.write_text(json.dumps({"measured": self.measured, "tests": self.tests, "done": self.done}))
        part.replace(STATE)


def digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def announce(mutants: list[Mutant], state: State) -> Generator[Mutant]:
    """The mutants, one by one, with a line for each survivor and a count now and then."""
    began, killed = time.monotonic(), 0
    for number, mutant in enumerate(mutants, 1):
        yield mutant
        result = state.done[mutant.name]
        killed += result["killed"]
        if not result["killed"]:
            print(f"survived: {PACKAGE.relative_to(ROOT)}/{mutant.file}:{mutant.line} {mutant.name}", flush=True)
        if number % 20 == 0 or number == len(mutants):
            print(f"{number} of {len(mutants)}, {killed} killed, {time.monotonic() - began:.0f} s", flush=True)


def test(mutant: Mutant, copy: Path, state: State, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the tests that reach a mutant in a copy of the package. Killed: one failed, timed out, or the package did not load."""
    if known := state.get(mutant):
        return known
    ids = nearest_tests(mutant, state.tests, options.budget, options.new)
    seconds = sum(state.tests[id]["seconds"] for id in ids)
    path = copy / mutant.file
    original, times = path.read_bytes(), path.stat().st_mtime
    try:
        path.write_text(mutant.render())
        os.utime(path, (times, times - 1 - len(state.done)))  # another time for each mutant: cached bytecode is not taken for it
        limit = 20 + 4 * seconds
        result = (
            fork(lambda: run_tests(copy, ids), cpu=int(limit), wall=10 * limit) if ids else {"killed": False, "by": "no test reaches it"}
        )
    finally:
        path.write_bytes(original)
        os.utime(path, (times, times))
    return state.put(mutant, result or {"killed": True, "by": "time limit, or a crash"})


def nearest_tests(mutant: Mutant, tests: Tests, budget: float, new: list[str]) -> list[str]:
    """The tests that reach the changed function, the fastest first, for as long as the budget lasts; then the new ones.

    A change of a class or a module is reached by all tests that reach one of its functions.
    """
    here = f"{mutant.file}: {mutant.function}"

    def reaches(functions: list[str]) -> bool:
        return any(name == here or name.startswith(f"{here}." if mutant.function else here) for name in functions)

    def is_new(id: str) -> bool:
        return id.partition("::")[0] in new

    kept, total = list[str](), 0.0
    for id in sorted((id for id in tests if reaches(tests[id]["reached"])), key=lambda id: (is_new(id), tests[id]["seconds"])):
        total += 0.0 if is_new(id) else tests[id]["seconds"]
        if total <= budget or is_new(id):
            kept.append(id)
    return kept


def fork(work: Callable[[], Any], *, cpu: int, wall: float) -> Any | None:
    """What `work` returns in a child process, as JSON; None if the child died or ran longer than it may."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1)
                os.dup2(quiet, 2)
                answer.with_suffix(".part").write_text(json.dumps(work()))
                answer.with_suffix(".part").replace(answer)
            finally:
                os._exit(0)
        ends = time.monotonic() + wall
        try:
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
                if time.monotonic() > ends:
                    os.kill(child, signal.SIGKILL)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        return json.loads(answer.read_text()) if answer.exists() else None


def run_pytest(copy: Path, paths: Iterable[str], plugin: object, *more: str) -> int:
    """pytest over some files, with the package taken from `copy`. Only in a child: it imports `shaped`."""
    os.chdir(ROOT)
    sys.path.insert(0, str(copy.parent))
    os.environ["PYTHONPATH"] = str(copy.parent)
    imported = "ignore::pytest.PytestAssertRewriteWarning"  # hypothesis is a plugin, and `preload` imported it
    return pytest.main(["-n", "0", "-q", "-p", "no:cacheprovider", "-W", imported, *more, *paths], plugins=[plugin])


def run_tests(copy: Path, ids: list[str]) -> dict[str, Any]:
    plugin = InOrder(ids)
    code = run_pytest(copy, sorted({id.partition("::")[0] for id in ids}), plugin, "-x")
    return {"killed": code != 0, "by": plugin.failed or ("" if code == 0 else "import")}


class InOrder:
    """Runs the tests asked for, in the order asked for."""

    def __init__(self, ids: list[str]):
        self.place, self.failed = {id: place for place, id in enumerate(ids)}, ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid


def measure(copy: Path, tests: list[str], files: list[Path], longest: float) -> Tests:
    """The tests that pass, with their CPU time and the functions of `files` that they reach."""
    import functools

    functools.cached_property = property  # every test then reaches what it uses, not only the first that does
    plugin = Measure({str(copy / path.relative_to(PACKAGE)): str(path.relative_to(PACKAGE)) for path in files}, longest)
    run_pytest(copy, tests, plugin)
    return plugin.tests


class Slow(BaseException):
    """A test took longer than it may."""


class Measure:
    """Records which functions a test calls, and how long it takes. What a test file calls at its top belongs to each of its tests."""

    def __init__(self, files: dict[str, str], longest: float):
        self.files, self.longest = files, longest
        self.tests: Tests = {}
        self.at_import: dict[str, list[str]] = {}
        self.reached = set[str]()

    def pytest_sessionstart(self) -> None:
        def interrupt(*_: object) -> None:
            raise Slow

        signal.signal(signal.SIGPROF, interrupt)

    def watch(self, frame: Any, event: str, _: object) -> None:
        file = self.files.get(frame.f_code.co_filename) if event == "call" else None
        if file is not None and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # not the body of a class or a module
            self.reached.add(f"{file}: {frame.f_code.co_qualname.partition('.<locals>')[0]}")

    def watched(self) -> Generator[None, Any, Any]:
        self.reached.clear()
        threading.setprofile(self.watch)
        sys.setprofile(self.watch)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        report = yield from self.watched()
        self.at_import[collector.nodeid] = sorted(self.reached)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        began = cpu_seconds()
        signal.setitimer(signal.ITIMER_PROF, self.longest)
        try:
            done = yield from self.watched()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        at_import = self.at_import.get(item.nodeid.partition("::")[0], [])
        if (seconds := cpu_seconds() - began) <= self.longest:
            self.tests[item.nodeid] = {"seconds": seconds, "reached": sorted(self.reached.union(at_import))}
        return done


def cpu_seconds() -> float:
    """Of this process and of the children that have ended."""
    return sum(os.times()[:4])


def write_report(options: argparse.Namespace, mutants: list[Mutant], results: list[dict[str, Any]], about: dict[str, int]) -> None:
    """Counts, shares and survivors. Imports `shaped`, so it comes last."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # not before the tests: benchmarks/train.py would hide their package `train`
    from common import report

    from shaped.intervals import share_interval

    def counted(of: Callable[[Mutant], str]) -> dict[str, dict[str, int]]:
        total, killed = Counter(map(of, mutants)), Counter(of(m) for m, result in zip(mutants, results, strict=True) if result["killed"])
        return {name: {"mutants": total[name], "killed": killed[name]} for name in sorted(total)}

    def share(killed: int) -> dict[str, Any]:
        low, high = share_interval(killed, len(mutants))
        print(f"killed: {killed} of {len(mutants)}, {100 * killed / len(mutants):.1f} % ({100 * low:.1f} to {100 * high:.1f})")
        return {"killed": killed, "share": killed / len(mutants), "interval": [low, high]}

    killers = [result["by"] for result in results if result["killed"]]
    survivors = [(m, result["by"]) for m, result in zip(mutants, results, strict=True) if not result["killed"]]
    counts = about | {"run": len(mutants)} | share(len(killers))
    if options.new:
        counts["without the new tests"] = share(sum(by.partition("::")[0] not in options.new for by in killers))
    report(
        Path(options.out),
        counts
        | {
            "files": counted(lambda mutant: mutant.file),
            "kinds": counted(lambda mutant: mutant.kind),
            "survivors": [{"line": m.line, "mutant": m.name} | ({"why": why} if why else {}) for m, why in survivors],
        },
    )


if __name__ == "__main__":
    main()
