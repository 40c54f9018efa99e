"""Models by name, for the command line: a folder, a config.json, or a function that makes one; and a batch for them."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaped.checks import fold_seed
from shaped.diagnosis.memory import check_config
from shaped.files import read_json, read_text
from shaped.process import quote_error, require

TOKENS, SEQUENCES = 128, 2


@dataclass(frozen=True)
class Subject:
    """A model and what it is given, with a few words about each."""

    model: nn.Module
    batch: Any
    name: str
    about: str


def load_subject(
    model: str, *, text: Path | None = None, tokens: int | None = None, sequences: int | None = None, seed: int = 0
) -> Subject:
    """The model, and its batch: the beginning of a text, random tokens of its vocabulary, or what the function returned.

    Args:
        model: a folder with a config.json and weights, a config.json (then the weights are drawn with the seed), or
            `package.module:function`, which returns a model or a model and its batch.
        text: UTF-8, cut into sequences by the tokenizer in the model's folder.
        tokens, sequences: 128 and 2 by default; fewer tokens where the model has fewer positions.
        seed: of the weights and of the random tokens.
    """
    if ":" in model and not Path(model).exists():
        made, batch = call_function(model, seed)
        if batch is not None:
            ignored = {"text": text, "tokens": tokens, "sequences": sequences}
            for name, value in ignored.items():
                if value is not None:
                    raise ValueError(f"{name} must not be given where the function returns a batch itself, got {value}")
            return Subject(made, batch, model, "the batch of the function")
        folder, missing = None, []
    else:
        made, folder, missing = load_from_disk(model, seed)
    name = model.rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1].removesuffix(".json") or model
    batch, about = make_batch(made, folder, text, tokens, sequences, seed)
    if missing:
        about += f"; {len(missing)} weights are not in the folder and were drawn, such as {missing[0]}"
    return Subject(made, batch, name, about)


def call_function(place: str, seed: int) -> tuple[nn.Module, Any]:
    """What `package.module:function` returns: a model and a batch, None if it returns none. The current folder is on the path.

    PyTorch's random numbers start from the seed, so that the same command gives the same model.
    """
    module_name, _, function_name = place.partition(":")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # the module's own code may raise anything
        said = f"{type(error).__name__}: {quote_error(error)}"
        raise ValueError(f"model must be a function that can be imported, as package.module:function, got {place!r}: {said}") from error
    finally:
        if folder in sys.path:  # the module may have changed the path, or the current folder
            sys.path.remove(folder)
    if not callable(function):
        raise ValueError(f"model must be a function, as package.module:function, got {place!r}, which is of {type(function).__name__}")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(fold_seed(seed))
            made = function()
    except Exception as error:
        raise ValueError(f"model must be a function that runs, got {place!r}: {type(error).__name__}: {quote_error(error)}") from error
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a function that returns a torch.nn.Module, or one and its batch, got {type(model).__name__}")
    return model, batch


def load_from_disk(place: str, seed: int) -> tuple[nn.Module, Path, list[str]]:
    """A model of transformers, its folder, and the weights that the folder lacks. Nothing is fetched, and no code of the folder is run."""
    path = Path(place)
    file = path / "config.json" if path.is_dir() else path
    try:
        read_json(file, model_type=str)
    except FileNotFoundError:
        raise ValueError(
            f"model must be a folder with a config.json, such a file, or package.module:function, got {place!r}, which is none of them"
        ) from None
    require("a config.json", "hf", "transformers")
    from transformers import AutoConfig

    with explain_errors(place):
        config = AutoConfig.from_pretrained(file, local_files_only=True)
        kind = choose_class(config)
    with explain_errors(place, ValueError):
        check_config(kind, config, drawn=not path.is_dir())
    with explain_errors(place):
        torch.manual_seed(fold_seed(seed))
        if not path.is_dir():
            return kind.from_config(config), path.parent, []
        model, found = kind.from_pretrained(path, config=config, local_files_only=True, output_loading_info=True)
    return model, path, sorted(found["missing_keys"])


@contextmanager
def explain_errors(place: str, *as_they_are: type[Exception]) -> Iterator[None]:
    """Around what transformers does, in silence and with random numbers of its own: its errors in one line."""
    from shaped.hf.quiet import silence_transformers  # shaped.hf also tells transformers what a model of type shaped is

    try:
        with silence_transformers(), torch.random.fork_rng(devices=[]):
            yield
    except as_they_are:
        raise
    except Exception as error:  # transformers has several classes of errors, some over many lines
        raise ValueError(f"model must be one that transformers can load, got {place!r}: {quote_error(error)}") from None


def choose_class(config: Any) -> Any:
    """The Auto class of the config's own architecture, or else of the task that its family has a loss for."""
    import transformers

    names = ("Seq2SeqLM",) if getattr(config, "is_encoder_decoder", False) else ()
    names += ("CausalLM", "MaskedLM") if getattr(config, "is_decoder", False) else ("MaskedLM", "CausalLM")
    names += ("ImageClassification", "SequenceClassification", "TokenClassification", "QuestionAnswering")
    kinds = [getattr(transformers, f"AutoModelFor{name}") for name in names]
    fitting = [kind for kind in kinds if type(config) in kind._model_mapping]
    for kind in fitting:
        if kind._model_mapping[type(config)].__name__ in (config.architectures or ()):
            return kind
    return fitting[0] if fitting and not config.architectures else transformers.AutoModel


def make_batch(
    model: nn.Module, folder: Path | None, text: Path | None, tokens: int | None, sequences: int | None, seed: int
) -> tuple[dict[str, Tensor], str]:
    """A batch of ids or of images, and what it is, in words."""
    config: Any = getattr(model, "config", None)
    generator = torch.Generator().manual_seed(fold_seed(seed))
    rows = SEQUENCES if sequences is None else sequences
    if getattr(model, "main_input_name", "") == "pixel_values":
        return make_images(config, text, tokens, rows, generator), "images of white noise"
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ValueError(f"model must have a vocabulary, or its function must return a batch too, got {type(model).__name__}")
    length = tokens if tokens is not None else min(TOKENS, count_positions(model) or TOKENS)
    if text is None:
        usual = torch.tensor([number for number in range(vocabulary) if number != getattr(config, "pad_token_id", None)])
        ids = usual[torch.randint(len(usual), (rows, length), generator=generator)]
        about = "random tokens of the vocabulary: real text (--text FILE) may look different"
    else:
        ids, about = read_ids(folder, text, rows, length), f"the beginning of {text}"
    batch = {"input_ids": ids}
    if "labels" in inspect.signature(model.forward).parameters and predicts_tokens(model):
        batch["labels"] = ids
        about += "; labels: the tokens themselves"
    return batch, about


def make_images(config: Any, text: Path | None, tokens: int | None, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    for name, value in (("text", text), ("tokens", tokens)):
        if value is not None:
            raise ValueError(f"{name} must not be given for a model of images, got {value}")
    size = getattr(config, "image_size", None)
    if size is None:
        raise ValueError(
            f"model must have an image_size in its config, or its function must return a batch too, got {type(config).__name__}"
        )
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.randn(count, config.num_channels, height, width, generator=generator)}


def count_positions(model: nn.Module) -> int | None:
    """Tokens of a sequence by the config, None if it has none. In tables with a row of padding, as RoBERTa's, they begin behind it."""
    positions: Any = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)]
    return positions - max((1 + table.padding_idx for table in tables if table.padding_idx is not None), default=0)


def predicts_tokens(model: Any) -> bool:
    """Has it a head over the vocabulary? The labels of a classifier are not tokens."""
    find_head = getattr(model, "get_output_embeddings", None)
    return callable(find_head) and find_head() is not None


def read_ids(folder: Path | None, text: Path, sequences: int, tokens: int) -> Tensor:
    if folder is None:
        raise ValueError(f"text must not be given for a function, which returns its own batch, got {text}")
    try:
        content = read_text(text)
    except OSError as error:  # such as a missing file
        raise ValueError(f"text must be a file that can be read, got {text}: {error.strerror}") from None
    from transformers import AutoTokenizer

    from shaped.hf.quiet import silence_transformers

    try:
        with silence_transformers():  # no warning that the text is longer than a sequence: it is cut below
            ids = AutoTokenizer.from_pretrained(folder, local_files_only=True)(content, add_special_tokens=False)["input_ids"]
    except Exception as error:
        raise ValueError(f"text must come with a tokenizer in the model's folder, got none in {folder}: {quote_error(error)}") from None
    whole = min(len(ids) // tokens, sequences)
    if not whole:
        raise ValueError(f"text must have at least {tokens} tokens, got {len(ids)} in {text}")
    return torch.tensor(ids[: whole * tokens]).view(whole, tokens)
