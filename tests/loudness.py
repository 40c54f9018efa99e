"""What transformers says is the caller's choice."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import INFO

from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging


def read_loudness() -> tuple[int, bool, bool]:
    return logging.get_verbosity(), logging.is_progress_bar_enabled(), not are_progress_bars_disabled()


@contextmanager
def stays_loud() -> Iterator[None]:
    """Transformers says everything before, and must do so afterwards."""
    level, has_bars, _ = read_loudness()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        yield
        assert read_loudness() == (INFO, True, True)
    finally:
        logging.set_verbosity(level)
        if not has_bars:
            logging.disable_progress_bar()
