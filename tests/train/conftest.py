"""A small text that is learnt quickly: each document has four words of forty, so that a masked word is one of four."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from shaped.commands import app as cli
from shaped.train.data import prepare as data
from shaped.train.run.settings import Settings

LENGTH, WORDS, OF_A_DOCUMENT = 32, 40, 4
UNIFORM, KNOWN = math.log(WORDS), math.log(OF_A_DOCUMENT)  # the loss of a model that knows the words, and of one that sees the document


def documents(count: int, seed: int = 0) -> str:
    """A document fills a row: [CLS], the words, [SEP]."""
    generator = np.random.default_rng(seed)
    words = np.array([consonant + vowel for consonant in "bdfgklmn" for vowel in "aeiou"])
    chosen = [generator.choice(generator.choice(words, OF_A_DOCUMENT, replace=False), LENGTH - 2) for _ in range(count)]
    return "\n\n".join(" ".join(line) for line in chosen) + "\n"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(documents(600))
    return path


@pytest.fixture(scope="session")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    data.prepare([str(text)], out, vocab=80, length=LENGTH, valid_share=0.1, progress=False)
    return out


@pytest.fixture
def tiny(prepared: Path, tmp_path: Path) -> Settings:
    """A run of a second or two."""
    return Settings(
        data=prepared,
        out=tmp_path / "run",
        depth=2,
        width=32,
        heads=2,
        gamma=0.5,
        batch=16,
        steps=120,
        warmup=20,
        recover_steps=40,
        tau0=1.0,
        embedding_lr=1.0,
        decay="none",
        lr=1e-2,
        log_every=20,
        evaluate_every=60,
        observe_every=60,
        checkpoint_every=40,
        tensorboard=False,
        device="cpu",
    )


def status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """What the command exits with."""
    monkeypatch.setattr(sys, "argv", ["shaped", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)
