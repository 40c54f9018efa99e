"""The fields' values for a model in use, read from its config."""

from __future__ import annotations

from typing import Any

from shaped.explore.fields import FIELDS, parse_question
from shaped.files import check_entries, parse_json
from shaped.process import quote_error, require

NAME = "config"
PROBE = 4
"""Tokens of the network that a config describes. The values do not depend on it."""


def read_values(text: str) -> dict[str, Any]:
    """`values` of the fields that a config determines, and `notes` about what of it is left out; or `error`, in one line."""
    try:
        return read_sizes_of(text)
    except (ValueError, ArithmeticError) as error:
        return {"error": quote_error(error, None)}


def check_lengths(entries: dict[str, Any]) -> None:
    """Takes off and refuses what transformers makes long lists of, one entry a label or a layer: a short text would fill the memory."""
    entries.pop("num_labels", None)
    most = next(field.high for field in FIELDS if field.name == "depth")
    for name, value in entries.items():
        if "layer" in name and isinstance(value, int) and value > (most or 0):
            raise ValueError(f"{name} must be at most {most}, got {value}")


def read_sizes_of(text: str) -> dict[str, Any]:
    require("config", "hf", "transformers")
    from shaped.hf.prediction.families import make_config
    from shaped.hf.prediction.sizes import read_sizes

    entries = check_entries(NAME, parse_json(NAME, text))
    check_lengths(entries)
    sizes = read_sizes(make_config(NAME, entries), PROBE)
    plain_mask = sizes["mask"] is None or isinstance(sizes["mask"], str)
    values = {
        "width": sizes["n"],
        "depth": sizes["d"],
        "heads": sizes["heads"],
        "mask": (sizes["mask"] or "none") if plain_mask else "causal",
        "qk_norm": sizes["qk_norm"],
    }
    values |= {"c_minus": sizes["c_minus"]} if "c_minus" in sizes else {}
    parse_question({name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()})
    left_out = [
        (sizes["hidden"] != sizes["n"], f"hidden width {sizes['hidden']}: the block here has {sizes['n']}, the width"),
        (sizes["rope"] is not None, "RoPE is left out"),
        (not plain_mask, "the bias on the logits is left out: the mask is causal"),
    ]
    return {"values": values, "notes": [note for applies, note in left_out if applies]}
