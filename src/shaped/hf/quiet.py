"""Transformers says nothing for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers.utils import logging


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Without progress bars and without warnings; both are then as the caller had them."""
    level, has_bars, hub_has_none = logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    logging.set_verbosity_error()
    if has_bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()  # also those of the hub
            if hub_has_none:
                disable_progress_bars()
