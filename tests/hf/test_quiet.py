"""Transformers is silenced for a while, and then as loud as before."""

from logging import ERROR, INFO

import pytest
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from transformers.utils import logging

from loudness import read_loudness, stays_loud
from shaped.hf.quiet import silence_transformers


def test_silence_ends_also_with_an_error():
    with stays_loud():
        with silence_transformers():
            assert read_loudness() == (ERROR, False, False)
        with pytest.raises(ZeroDivisionError), silence_transformers():
            _ = 1 / 0


def test_what_was_silent_stays_silent():
    with stays_loud():
        disable_progress_bars()  # the hub's alone
        with silence_transformers():
            assert read_loudness() == (ERROR, False, False)
        assert read_loudness() == (INFO, True, False)
        logging.disable_progress_bar()
        enable_progress_bars()
        with silence_transformers():
            pass
        assert read_loudness() == (INFO, False, True)
        logging.enable_progress_bar()
