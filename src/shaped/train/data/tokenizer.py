"""The tokenizer of a prepared text: WordPiece, in the Hugging Face format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shaped.files import read_text, remove, sha256

PAD, UNKNOWN, FIRST, END, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""`[CLS]` begins a row, `[SEP]` ends a document; they are the first entries of every vocabulary, in this order."""

ROLES = {"pad_token": PAD, "unk_token": UNKNOWN, "cls_token": FIRST, "sep_token": END, "mask_token": MASK}


def load_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(read_text(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{folder} must be a tokenizer, got what cannot be read: {error}") from None


def hash_files(folder: Path) -> dict[str, str]:
    """Hashes of the files in a folder, by name. Subfolders, which other tools may have put there, are ignored."""
    return {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}


def find_change(folder: Path, hashes: dict[str, str]) -> str:
    """The first of these files that is missing or has another hash, in words; empty if there is none. Other files are ignored."""
    for name, written in hashes.items():
        try:
            if sha256(folder / name) != written:
                return f"a changed {name}"
        except FileNotFoundError:
            return f"no {name}"
    return ""


def find_fault(folder: Path, hashes: dict[str, str], vocab: int) -> str:
    """What is wrong with the tokenizer in a folder, in words; empty if none. Without hashes, only the vocabulary's size is checked."""
    try:
        if not folder.exists():
            return "none"
        if fault := find_change(folder, hashes):
            return fault
        size = load_tokenizer(folder).get_vocab_size()
        return f"one of {size} entries, not of {vocab}" if size != vocab else ""
    except (OSError, ValueError) as error:
        return f"one that cannot be read: {error}"


def make_tokenizer(folder: Path, text: Callable[[], Iterator[str]], vocab: int, length: int, cased: bool) -> None:
    """Trains a WordPiece tokenizer on the text and writes it in the Hugging Face format. An old one in the folder is replaced."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def build_tokenizer(model: Any) -> Any:
        made: Any = Tokenizer(model)
        made.normalizer = normalizers.BertNormalizer(lowercase=not cased, strip_accents=not cased)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        return made

    def train_vocabulary(size: int, first: list[str]) -> dict[str, int]:
        """A vocabulary of `size` entries that begins with `first`."""
        made = build_tokenizer(models.WordPiece(unk_token=UNKNOWN))
        made.train_from_iterator(text(), trainers.WordPieceTrainer(vocab_size=size, special_tokens=first, show_progress=False))
        return made.get_vocab()

    # Deterministic in spite of the trainer, which numbers the characters inside words in the order of a hash table that differs from
    # process to process, and breaks ties between pairs by these numbers. A first pass finds the characters; the second gets them sorted.
    characters = train_vocabulary(len(SPECIAL), list(SPECIAL))
    if len(characters) == len(SPECIAL):
        raise ValueError("text must have words to make a vocabulary from, got none")
    if len(characters) > vocab:
        raise ValueError(f"vocab must have room for the text's characters, at least {len(characters)}, got {vocab}")
    inside = sorted(entry for entry in characters if entry.startswith("##"))
    tokenizer = build_tokenizer(models.WordPiece(vocab=train_vocabulary(vocab, [*SPECIAL, *inside]), unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A {END}", pair=f"{FIRST} $A {END} $B:1 {END}:1", special_tokens=[(FIRST, 2), (END, 3)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ROLES, model_max_length=length)
    unfinished = folder.with_name(".tokenizer")
    shutil.rmtree(unfinished, ignore_errors=True)
    wrapped.save_pretrained(unfinished)
    remove(folder)
    os.replace(unfinished, folder)


def write_causal_tokenizer(source: Path, out: Path) -> None:
    """Writes the tokenizer for a model that goes on with a text: it does not put `[SEP]`, the end of a document, after the text.

    `[CLS]` and `[SEP]` are also its tokens of beginning and end, for `generate`, which pads on the left. Other files in `out` stay.
    """
    from tokenizers import processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    made = load_tokenizer(source)
    made.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A", pair=f"{FIRST} $A {END} $B", special_tokens=[(FIRST, 2), (END, 3)]
    )
    length = AutoTokenizer.from_pretrained(source).model_max_length
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        **ROLES,
        bos_token=FIRST,
        eos_token=END,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=length,
    ).save_pretrained(out)
