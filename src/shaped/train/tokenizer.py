"""The tokenizer of a prepared text: WordPiece, in the Hugging Face format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAD, UNKNOWN, FIRST, END, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""`[CLS]` begins a row, `[SEP]` ends a document; they are the first entries of every vocabulary, in this order."""


def tokenizer_in(out: Path, text: Callable[[], Iterator[str]], vocab: int, length: int, cased: bool) -> Any:
    """A WordPiece tokenizer in the Hugging Face format, trained on the text unless the folder has it already."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    folder = out / "tokenizer"
    if not folder.exists():

        def cutting(model: Any) -> Any:
            made: Any = Tokenizer(model)
            made.normalizer = normalizers.BertNormalizer(lowercase=not cased, strip_accents=not cased)
            made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            made.decoder = decoders.WordPiece()
            return made

        def entries(size: int, first: list[str]) -> dict[str, int]:
            """A vocabulary of so many entries, these before all others."""
            made = cutting(models.WordPiece(unk_token=UNKNOWN))
            made.train_from_iterator(text(), trainers.WordPieceTrainer(vocab_size=size, special_tokens=first, show_progress=False))
            return made.get_vocab()

        # The trainer numbers characters inside of words as it meets them in a table that is ordered anew in every process, and between
        # equally frequent pairs the numbers decide. So they are looked for first, and given in order.
        characters = entries(len(SPECIAL), list(SPECIAL))
        if len(characters) == len(SPECIAL):
            raise ValueError("text must have words to make a vocabulary from, got none")
        if len(characters) > vocab:
            raise ValueError(f"vocab must have room for the text's characters, at least {len(characters)}, got {vocab}")
        inside = sorted(entry for entry in characters if entry.startswith("##"))
        tokenizer = cutting(models.WordPiece(vocab=entries(vocab, [*SPECIAL, *inside]), unk_token=UNKNOWN))
        tokenizer.add_special_tokens(list(SPECIAL))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{FIRST} $A {END}", pair=f"{FIRST} $A {END} $B:1 {END}:1", special_tokens=[(FIRST, 2), (END, 3)]
        )
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=PAD,
            unk_token=UNKNOWN,
            cls_token=FIRST,
            sep_token=END,
            mask_token=MASK,
            model_max_length=length,
        )
        unfinished = out / ".tokenizer"
        shutil.rmtree(unfinished, ignore_errors=True)
        wrapped.save_pretrained(unfinished)
        os.replace(unfinished, folder)
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing more special
        raise ValueError(f"out must have a whole tokenizer or none, got {folder}: {error}; delete {out} to begin anew") from None
