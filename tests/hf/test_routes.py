"""Every way to a shaped model that the README and docs/huggingface.md show, saved and loaded; and silence meanwhile."""

import json
from logging import ERROR, INFO
from typing import Any

import pytest
import torch
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from stock import BOTH, DECODERS, ENCODERS, IMAGES, bert, gpt2, llama, made, t5
from test_interface import inputs
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    CLIPConfig,
    CLIPModel,
)
from transformers.utils import logging

from loudness import read_loudness, stays_loud
from shaped import hf
from shaped.hf.quiet import silence_transformers
from shaped.nn import Recover

AUTO = (
    dict.fromkeys(ENCODERS, AutoModelForMaskedLM)
    | dict.fromkeys(DECODERS, AutoModelForCausalLM)
    | dict.fromkeys(BOTH, AutoModelForSeq2SeqLM)
    | dict.fromkeys(IMAGES, AutoModelForImageClassification)
)
EVERY = ENCODERS | DECODERS | BOTH | IMAGES


def stock(name):
    return made(EVERY[name], "sdpa").float()


def from_config(name, folder):
    model = AUTO[name].from_config(EVERY[name]()[1], attn_implementation="shaped")
    model.load_state_dict(stock(name).state_dict())
    return model


def from_pretrained(name, folder):
    stock(name).save_pretrained(folder)
    return AUTO[name].from_pretrained(folder, attn_implementation="shaped")


def set_later(name, folder):
    model = stock(name)
    model.set_attn_implementation("shaped")
    return model


def in_the_config(name, folder):
    made_of: Any = EVERY[name](attn_implementation="shaped")
    model = made_of[0](made_of[1])
    model.load_state_dict(stock(name).state_dict())
    return model


def shape(name, folder):
    return hf.shape(stock(name))


@pytest.mark.parametrize("route", [from_config, from_pretrained, set_later, in_the_config, shape], ids=lambda route: route.__name__)
@pytest.mark.parametrize("name", EVERY)
def test_a_shaped_model_comes_back_shaped(name, route, tmp_path):
    model = route(name, tmp_path / "stock").eval()
    given = {key: value.float() if value.is_floating_point() else value for key, value in inputs(name).items()}
    expected = model(**given).logits
    assert (expected - stock(name)(**given).logits).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "once")
    again = AUTO[name].from_pretrained(tmp_path / "once")
    again.save_pretrained(tmp_path / "twice")
    twice = AUTO[name].from_config(AutoConfig.from_pretrained(tmp_path / "twice")).eval()
    twice.load_state_dict(again.state_dict())
    for loaded in (again, twice, type(model).from_pretrained(tmp_path / "twice")):
        assert loaded.config._attn_implementation == "shaped"
        assert torch.equal(loaded(**given).logits, expected)


@pytest.mark.parametrize("route", [from_config, shape], ids=lambda route: route.__name__)
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_another_attention_is_honoured_and_what_that_means_is_said(name, route, tmp_path):
    model, given = route(name, tmp_path / "stock"), inputs(name)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="attn_implementation='sdpa' drops the shaping") as said:
        plain = AUTO[name].from_pretrained(tmp_path, attn_implementation="sdpa")
    assert len({str(one.message) for one in said}) == 1
    assert torch.equal(plain(**given).logits, stock(name)(**given).logits)
    with pytest.warns(UserWarning, match="drops the shaping"):
        model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "plain")
    assert "attn_implementation" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize("choice", ["sdpa", None])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_it_is_said_once_on_every_route(name, choice, tmp_path):
    """Also where the choice overrides that of a config which was read before."""
    model = from_config(name, None)
    model.save_pretrained(tmp_path)
    for load in (
        lambda: AUTO[name].from_pretrained(tmp_path, attn_implementation=choice),
        lambda: type(model).from_pretrained(pretrained_model_name_or_path=tmp_path, attn_implementation=choice),
        lambda: AUTO[name].from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path), attn_implementation=choice),
        lambda: type(model).from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path), attn_implementation=choice),
        lambda: AUTO[name].from_config(AutoConfig.from_pretrained(tmp_path), attn_implementation=choice),
    ):
        with pytest.warns(UserWarning, match=f"attn_implementation={choice!r} drops the shaping") as said:
            assert load().config._attn_implementation == "sdpa"
        assert len(said) == 1


@pytest.mark.parametrize(
    "kind",
    [
        *(hf.ShapedForMaskedLM, hf.ShapedForCausalLM, hf.ShapedModel),
        *(hf.ShapedForSequenceClassification, hf.ShapedForTokenClassification, hf.ShapedForQuestionAnswering),
    ],
)
def test_a_head_and_the_model_inside_it_say_it_once(kind, tmp_path):
    config = hf.ShapedConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    kind(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="attn_implementation='sdpa' drops the shaping") as said:
        kind.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert len(said) == 1


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_the_way_back_is_open_by_default_and_from_every_route(make, tmp_path):
    """Also for a model that was shaped by name before it was by `shape`: what comes back is stock after it was saved, too."""
    name, given = make.__name__, inputs(make.__name__)
    model = hf.shape(from_config(name, None).eval())
    Recover(3).apply(model, 3)
    hf.vanilla(model).save_pretrained(tmp_path)
    again = AUTO[name].from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(again(**given).logits, stock(name)(**given).logits)


def test_a_part_that_is_shaped_alone_comes_back_so(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    text = sizes | {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 20}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 8, "patch_size": 4}, projection_dim=8))
    clip.set_attn_implementation({"text_config": "shaped"})
    clip.save_pretrained(tmp_path)
    again = CLIPModel.from_pretrained(tmp_path)
    parts = (again, again.text_model, again.vision_model)
    assert [part.config._attn_implementation for part in parts] == ["sdpa", "shaped", "sdpa"]


def test_t5_has_one_attention_in_all_its_copies_of_the_config(tmp_path):
    from_config("t5", None).save_pretrained(tmp_path)
    model = t5()[0].from_pretrained(tmp_path)
    assert [part.config._attn_implementation for part in (model, model.encoder, model.decoder)] == ["shaped"] * 3


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
