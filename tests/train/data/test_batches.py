"""Masked batches: functions of (seed, step), with the shares that they promise."""

from pathlib import Path

import numpy as np
import pytest
import torch

from refusals import refused
from shaped.testing.stats import Z, seed
from shaped.train.data.masking import MaskedBatches, scramble
from shaped.train.data.prepared import load_data

SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
VOCAB, LENGTH = 1005, 128


def batches(rows: int = 64, batch: int = 32, number: int = 0, **how) -> MaskedBatches:
    tokens = np.random.default_rng(seed(1)).integers(5, VOCAB, (rows, LENGTH))
    tokens[:, 0], tokens[:, 50] = 2, 3
    return MaskedBatches(tokens, batch=batch, seed=number, vocab=VOCAB, special=SPECIAL, **how)


def test_fifteen_percent_in_every_row_never_a_special_token():
    ids, places, labels = batches().chunk(0, 40)
    assert ids.shape == (40, 32, LENGTH)
    assert places.shape == labels.shape == (40, 32, 19)  # round(0.15·128)
    assert all(len(set(row)) == 19 for row in places.flatten(0, 1).tolist())
    assert labels.min() >= 5
    assert (ids[..., 0] == 2).all()
    assert (ids[..., 50] == 3).all()


def test_eight_masked_one_random_one_kept():
    """Shares of 80/10/10 within 5 standard errors; a random token is the old one by chance 1 of 1000."""
    made = batches(number=seed(2))
    ids, places, labels = made.chunk(0, 200)
    now = ids.gather(-1, places)
    masked, kept = (now == 4).double(), (now == labels).double()
    other = 1 - masked - kept
    count = now.numel()
    for share, expected in ((masked, 0.8), (kept, 0.1 + 0.1 / 1000), (other, 0.1 * (1 - 1 / 1000))):
        error = (expected * (1 - expected) / count) ** 0.5
        assert abs(share.mean().item() - expected) < Z * error
        assert 0.05 * expected > Z * error, "an error of 5 % must not pass"
    drawn = now[(now != 4) & (now != labels)].double()
    spread = (VOCAB - 5) / 12**0.5 / len(drawn) ** 0.5
    assert abs(drawn.mean().item() - (4 + VOCAB) / 2) < Z * spread
    assert drawn.min() >= 5


def test_places_are_uniform_and_independent():
    """Each place that can be masked is, with probability 19/126; and any two of them with that of draws without replacement."""
    _, places, _ = batches(number=seed(3)).chunk(0, 500)
    chosen = torch.zeros(500 * 32, LENGTH, dtype=torch.float64).scatter_(1, places.flatten(0, 1), 1.0)
    usable = [place for place in range(LENGTH) if place not in (0, 50)]
    share, pair = 19 / 126, 19 / 126 * 18 / 125
    off = (chosen.mean(0)[usable] - share).abs() / (share * (1 - share) / len(chosen)) ** 0.5
    assert off.max() < Z
    pairs = (chosen[:, usable].mT @ chosen[:, usable] / len(chosen)).fill_diagonal_(pair)
    assert ((pairs - pair).abs() / (pair * (1 - pair) / len(chosen)) ** 0.5).max() < Z + 0.5  # of 7875 pairs
    assert not torch.equal(places[0], places[1])


def test_a_batch_depends_on_seed_and_step_alone():
    made = batches()
    whole = made.chunk(0, 5)
    for step in (3, 0, 4):
        assert all(torch.equal(one[0], all_[step]) for one, all_ in zip(made.chunk(step, 1), whole, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(batches().chunk(0, 5), whole, strict=True))
    assert not torch.equal(batches(number=1).chunk(0, 1)[0], whole[0][:1])


def test_processes_share_a_batch():
    whole = batches().chunk(1, 3)
    parts = [batches(rank=rank, world=4).chunk(1, 3) for rank in range(4)]
    for i in range(3):
        assert torch.equal(torch.cat([part[i] for part in parts], 1), whole[i])


def test_an_epoch_has_every_row_once_in_another_order():
    made = batches(rows=64, batch=16)
    epochs = [np.concatenate([made.numbers(step) for step in range(4 * epoch, 4 * epoch + 4)]) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])


def test_a_row_with_too_few_words_is_filled_with_special_tokens():
    rows = np.full((4, 16), 3)
    rows[:, 5] = 9
    _, places, labels = MaskedBatches(rows, batch=4, seed=0, vocab=20, special=SPECIAL).chunk(0, 1)
    assert (labels[..., 0] == 9).all()
    assert (places[..., 0] == 5).all()
    assert (labels[..., 1:] == 3).all()


def test_scramble_is_splitmix64():
    """The first outputs of the generator with seed 1234567, as published with it."""
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + k * golden) % 2**64 for k in range(1, 4)]
    signed = torch.tensor([state - 2**64 if state >> 63 else state for state in states])
    assert [value % 2**64 for value in scramble(signed).tolist()] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_wrong_batches_are_refused(prepared: Path):
    made = load_data(prepared)
    with refused("batch", "540", "1000"):
        MaskedBatches.of(made, "train", batch=1000, seed=0)
    with refused("batch", "3", "16"):
        MaskedBatches.of(made, "train", batch=16, seed=0, world=3)
    with pytest.raises(ValueError, match="share"):
        MaskedBatches.of(made, "train", batch=16, seed=0, share=1.5)
