"""Causal batches: the next token as label, the borders of documents, functions of (seed, step)."""

import numpy as np
import pytest
import torch

from refusals import refused
from shaped.train.data.causal import CausalBatches, find_positions, mask_documents

CLS, SEP, NONE = 2, 3, -100
ROWS = np.array([[CLS, 5, 6, SEP, 7, SEP, 8, 9], [CLS, 10, 11, 12, 13, 14, 15, 16], [CLS, 5, SEP, SEP, 6, 7, 8, SEP], [CLS] + [9] * 7])


def batches(borders: str = "ignore", **how) -> CausalBatches:
    return CausalBatches(ROWS, **{"end": SEP, "borders": borders, "batch": 2, "seed": 0} | how)


def test_the_label_is_the_next_token():
    tokens, labels, counts = batches().chunk(0, 3)
    assert tokens.shape == labels.shape == (3, 2, 8)
    assert torch.equal(labels[..., :-1], tokens[..., 1:])
    assert (labels[..., -1] == NONE).all()
    assert counts.tolist() == [14.0] * 3
    again = batches().chunk(2, 1)
    assert torch.equal(again[0][0], tokens[2])
    assert sorted(map(tuple, tokens[:2].flatten(0, 1).tolist())) == sorted(map(tuple, ROWS.tolist()))  # an epoch has every row once


def test_no_label_crosses_a_border():
    tokens, labels, counts, positions = batches("respect", batch=4).chunk(0, 1)
    found = {tuple(row): (label, place) for row, label, place in zip(*(x[0].tolist() for x in (tokens, labels, positions)), strict=True)}
    assert found[tuple(ROWS[0])] == ([5, 6, SEP, NONE, SEP, NONE, 9, NONE], [0, 1, 2, 3, 0, 1, 0, 1])
    assert found[tuple(ROWS[2])] == ([5, SEP, NONE, NONE, 7, 8, SEP, NONE], [0, 1, 2, 0, 0, 1, 2, 3])
    assert counts.item() == (labels != NONE).sum() == 5 + 7 + 5 + 7


def test_two_processes_share_the_count():
    """The mean over the processes of sums of losses over the count is the mean over all labels."""
    whole = batches("respect").chunk(0, 2)
    parts = [batches("respect", rank=rank, world=2).chunk(0, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part[0] for part in parts], 1), whole[0])
    assert torch.equal(parts[0][2], parts[1][2])
    assert torch.equal(2 * parts[0][2], whole[2])
    assert batches(rank=1, world=2).chunk(0, 1)[2].item() == 7.0


def test_documents_are_blocks_of_the_mask():
    positions = find_positions(torch.from_numpy(ROWS[:1]), SEP)
    mask = mask_documents(positions)[0, 0]
    assert torch.equal(mask, torch.block_diag(*(torch.ones(size, size) for size in (4, 2, 2))).bool())


def test_other_borders_are_refused():
    with refused("borders", "ignore, respect", "'cross'"):
        batches("cross")


@pytest.mark.parametrize("borders", ["ignore", "respect"])
def test_sizes_tell_programs_apart(borders: str):
    assert batches(borders).sizes == (8, borders == "respect", 2)
