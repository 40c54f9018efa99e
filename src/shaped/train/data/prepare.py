"""`shaped data prepare`: text → tokenizer → rows of tokens in memory-mapped arrays, with counts and hashes.

Text is streamed: memory does not grow with the corpus. What was written is recorded chunk by chunk, and a run that was interrupted goes on
where it stopped. A folder is complete once it has `data.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shaped.checks import in_range, whole_number
from shaped.files import check_writable, read_json, remove, write_sealed
from shaped.train.data.packing import pack_rows, progress_file
from shaped.train.data.prepared import IDS, PARTS, Data, load_data
from shaped.train.data.text import Line, fingerprint, is_file, read_lines
from shaped.train.data.tokenizer import SPECIAL, find_change, hash_files, load_tokenizer, make_tokenizer
from shaped.train.folder_lock import folder_lock


def prepare(
    text: list[str],
    out: Path,
    *,
    valid: list[str] | None = None,
    vocab: int = 32_000,
    length: int = 128,
    valid_share: float = 0.01,
    cased: bool = False,
    tokens: int | None = None,
    progress: bool = True,
    log: Callable[[str], object] = print,
) -> Data:
    """Trains a tokenizer on the text and packs the text into rows. What the folder has already is not made again, unless it was damaged.

    Args:
        text, valid: sources (see `text.py`). Without `valid`, a share of the text's documents is held out.
        vocab, length: the tokenizer's entries and a row's tokens.
        valid_share: the share of documents that are held out, where there is no `valid`.
        cased: keep capitals and accents.
        tokens: stop after so many training tokens; what is left out is said in `data.json`.
    """
    if not text:
        raise ValueError("text must be at least one file or dataset, got none")
    whole_number("vocab", vocab, least=len(SPECIAL) + 1)
    whole_number("length", length, least=8)
    in_range("valid_share", valid_share, 0.0, 0.5)
    if tokens is not None:
        whole_number("tokens", tokens, least=length)
    check_writable(out)  # hashing the text takes its time
    request = {
        "text": [fingerprint(source) for source in text],
        "valid": [fingerprint(source) for source in valid or []],
        "vocab": vocab,
        "length": length,
        "valid_share": None if valid else valid_share,
        "cased": cased,
        "tokens": tokens,
    }
    with folder_lock(out):
        if not _is_same_request(out, request):
            write_sealed(out / "request.json", request)
            try:
                return _prepare_missing(out, request, {}, text, valid, progress)
            except ValueError:
                if not _has_begun(out):
                    (out / "request.json").unlink()
                raise
        whole = _find_whole_parts(out, log)
        return load_data(out) if len(whole) == len(PARTS) + 1 else _prepare_missing(out, request, whole, text, valid, progress)


def _prepare_missing(
    out: Path, request: dict[str, Any], whole: dict[str, Any], text: list[str], valid: list[str] | None, progress: bool
) -> Data:
    """Makes everything but `whole`: the facts of arrays, and the hashes of a tokenizer, that are there already."""
    vocab, length, valid_share, cased, tokens = (request[name] for name in ("vocab", "length", "valid_share", "cased", "tokens"))
    folder = out / "tokenizer"
    with _show_progress(progress) as bar:
        if "tokenizer" not in whole:
            make_tokenizer(folder, lambda: _read_training_text(text, valid, valid_share, bar("tokenizer", text)), vocab, length, cased)
            whole = whole | {"tokenizer": hash_files(folder)}
            write_sealed(progress_file(folder), {"files": whole["tokenizer"]})
        tokenizer = load_tokenizer(folder)
        tokenizer.encode_special_tokens = True  # "[SEP]" in the text is three pieces of text, not the end of a document
        size = tokenizer.get_vocab_size()
        dtype = "uint16" if size <= 1 << 16 else "uint32"
        parts = {}
        for part, sources in zip(PARTS, (text, valid or text), strict=True):
            if part in whole:
                parts[part] = whole[part]
                continue
            stream = _select_documents(_read_sources(sources, bar(part, sources)), None if valid else (part == "valid", valid_share))
            parts[part] = pack_rows(stream, tokenizer, out / f"{part}.bin", length, dtype, tokens if part == "train" else None)
    if not all(parts[part]["rows"] for part in PARTS):
        _clear(out)  # the right request will be another one
        counts = " and ".join(f"{parts[part]['rows']} from {parts[part]['documents']} documents" for part in PARTS)
        raise ValueError(
            f"text must fill rows of {length} tokens to train on and to test with, got {counts}: "
            "more text, blank lines between its documents, more of them held out (valid_share), or a test text of its own (valid)"
        )
    facts = {"format": 1, "vocab": size, "length": length, "dtype": dtype, "special": IDS, "tokenizer": whole["tokenizer"]}
    write_sealed(out / "data.json", facts | parts | {"request": request})
    for name in ("tokenizer", *(f"{part}.bin" for part in parts)):
        progress_file(out / name).unlink(missing_ok=True)
    return load_data(out)


def _find_whole_parts(out: Path, log: Callable[[str], object]) -> dict[str, Any]:
    """The parts of a folder that are as they were written: facts of arrays, hashes of the tokenizer. Others are logged and removed."""
    if not (out / "data.json").exists():
        return _find_whole_tokenizer(out, log)
    try:
        made = load_data(out)
    except ValueError as error:
        log(f"{error}; all is made anew")
        return {}
    whole: dict[str, Any] = {part: made.facts[part] for part in PARTS if made.is_intact(part)}
    if fault := made.find_tokenizer_fault():
        log(f"{out / 'tokenizer'} must be the tokenizer that was written, got {fault}: it is made anew, and the arrays with it")
        return {}
    for part in PARTS:
        begun = progress_file(out / f"{part}.bin").exists()  # by an earlier call, which removed what was there
        if part not in whole and not begun:
            log(f"{part}.bin in {out} is not what was written: it is made anew")
            for name in (f"{part}.bin", f"{part}.bin.xz"):
                remove(out / name)
    return whole | {"tokenizer": made.hash_tokenizer()}


def _find_whole_tokenizer(out: Path, log: Callable[[str], object]) -> dict[str, Any]:
    """The hashes of the tokenizer of a folder that is not finished, if its files are as recorded."""
    with suppress(OSError, ValueError):
        files = read_json(progress_file(out / "tokenizer"), files=dict)["files"]
        if files and not find_change(out / "tokenizer", files):
            return {"tokenizer": files}
    log(f"the tokenizer in {out} is not what was written: all is made anew")
    for part in PARTS:  # their rows may be of another tokenizer
        progress_file(out / f"{part}.bin").unlink(missing_ok=True)
    return {}


def _is_same_request(out: Path, request: dict[str, Any]) -> bool:
    """Was this folder begun with the same request? An error if it holds something else."""
    if not _has_begun(out):  # what was killed before it began is no claim
        return False
    try:
        before = read_json(out / "request.json")
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"out must be a new folder or one of an earlier call, got {out}, of which that cannot be told: {error}; delete it to begin anew"
        ) from None
    for key, value in request.items():
        if before.get(key) != value:
            raise ValueError(f"out must be a new folder or one prepared with the same {key}, {before.get(key)!r}, got {value!r} for {out}")
    return True


def _has_begun(out: Path) -> bool:
    return (out / "tokenizer").exists() or any(out.glob("*.bin*"))


def _clear(out: Path) -> None:
    """Removes what was made so far."""
    for name in ("tokenizer", *(f"{part}.bin" for part in PARTS)):
        remove(out / name)
        progress_file(out / name).unlink(missing_ok=True)


def _read_training_text(text: list[str], valid: list[str] | None, share: float, advance: Callable[[int], object]) -> Iterator[str]:
    return (line for line in _select_documents(_read_sources(text, advance), None if valid else (False, share)) if line is not None)


def _read_sources(sources: list[str], advance: Callable[[int], object]) -> Iterator[Line]:
    return (line for source in sources for line in read_lines(source, advance))


def _select_documents(stream: Iterator[Line], hold_out: tuple[bool, float] | None) -> Iterator[Line]:
    """The documents that are held out, or the others: document i is held out when i·share passes a whole number."""
    if hold_out is None:
        yield from stream
        return
    wanted, share = hold_out
    document = 1
    for line in stream:
        held = int(document * share) > int((document - 1) * share)
        if held is wanted:
            yield line
        document += line is None


@contextmanager
def _show_progress(wanted: bool) -> Iterator[Callable[[str, list[str]], Callable[[int], object]]]:
    """A progress bar a pass over the text, in bytes of the files read."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>9}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not wanted) as progress:

        def task(name: str, sources: list[str]) -> Callable[[int], object]:
            sizes = [Path(source).stat().st_size if is_file(source) else None for source in sources]
            total = None if None in sizes else sum(size for size in sizes if size is not None)
            number = progress.add_task(name, total=total)
            return lambda size: progress.advance(number, size)

        yield task
