"""Stock models that were shaped: saved and loaded with their gains, trained, and made plain again."""

import copy
import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stock import BOTH, DECODERS, ENCODER, ENCODERS, IMAGES, TOKENS, bart, bert, doge, gpt2, llama, made, own, t5, umt5
from test_interface import inputs
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, BertForSequenceClassification

from refusals import refused
from shaped import hf
from shaped.hf.attention import attention_forward, find_self_attentions
from shaped.nn import AttentionShaping, Recover, gains
from shaped.nn.attention_hooks import register_attention_hook
from shaped.testing.stats import generator

EVERY = ENCODERS | DECODERS | BOTH | IMAGES


def shapings(model):
    return [module for module in model.modules() if isinstance(module, AttentionShaping)]


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_saved_and_loaded_with_its_gains(name, learn, tmp_path):
    model = hf.shape(made(EVERY[name], "sdpa").float(), tau0=0.5, learn=learn)  # in float64 results depend on how memory is aligned
    for i, shaping in enumerate(shapings(model)):
        torch.nn.init.constant_(shaping.gamma1, 0.3 + 0.1 * i)
    given = {key: value.float() if value.is_floating_point() else value for key, value in inputs(name).items()}
    expected = model(**given).logits
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    again = type(model).from_pretrained(tmp_path)
    assert again.config._attn_implementation == "shaped"
    assert torch.equal(again(**given).logits, expected)
    assert len(gains(again)) == (2 * len(shapings(model)) if learn else 0)
    again.save_pretrained(tmp_path / "again")  # and once more
    assert torch.equal(type(model).from_pretrained(tmp_path / "again")(**given).logits, expected)


@pytest.mark.parametrize(("make", "auto"), [(bert, AutoModelForMaskedLM), (gpt2, AutoModelForCausalLM), (llama, AutoModelForCausalLM)])
def test_through_the_auto_classes(make, auto, tmp_path):
    model, given = hf.shape(made(make, "sdpa").float(), gamma1=0.4), inputs(make.__name__)
    model.save_pretrained(tmp_path)
    assert torch.equal(auto.from_pretrained(tmp_path)(**given).logits, model(**given).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base(**given)[0], model.base_model(**given)[0])
    assert "attn_implementation" in json.loads((tmp_path / "config.json").read_text())  # without shaped.hf, transformers refuses it
    with pytest.warns(UserWarning, match="drops the shaping"):
        stock = auto.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert stock.config._attn_implementation == "sdpa"
    assert torch.equal(stock(**given).logits, made(make, "sdpa").float()(**given).logits)
    stock.save_pretrained(tmp_path / "stock")
    assert "attn_implementation" not in json.loads((tmp_path / "stock" / "config.json").read_text())


def test_a_new_head_on_a_shaped_body(tmp_path):
    model = hf.shape(made(bert, "sdpa"), learn=True, gamma1=0.6)
    model.save_pretrained(tmp_path)
    classifier = BertForSequenceClassification.from_pretrained(tmp_path)
    assert [shaping.gamma1.item() for shaping in shapings(classifier)] == pytest.approx([0.6, 0.6])


@pytest.mark.parametrize("make", [bert, llama, t5])
def test_the_temperature_divides_the_logits(make):
    """tau0 = 2 at width 16 divides them by 8, whatever scaling the model has itself."""
    model, scales = hf.shape(made(make, "sdpa"), tau0=2.0), []

    for module in find_self_attentions(model).values():
        register_attention_hook(module, lambda module, inputs: scales.append(inputs.scale))
    model(**inputs(make.__name__))
    own = 1.0 if make is t5 else 0.5
    assert scales
    assert set(scales) == {own / 8}


def test_the_scale_of_the_model_is_kept_where_it_gives_none():
    module = torch.nn.Linear(1, 1)
    module.shaped_temperature = 0.25  # pyright: ignore[reportArgumentType]
    q, k, v = torch.randn(3, 1, 2, 5, 16, generator=generator(5))
    found, _ = attention_forward(module, q, k, v, None, is_causal=False)
    expected, _ = attention_forward(torch.nn.Linear(1, 1), q, k, v, None, is_causal=False, scaling=0.25 / math.sqrt(16))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("make", "count"), [(bert, 2), (llama, 2), (t5, 4), (bart, 4)])
def test_cross_attention_has_no_gains(make, count):
    model = hf.shape(made(make, "sdpa"), learn=True)
    assert len(shapings(model)) == count
    model(**inputs(make.__name__)).logits.square().sum().backward()
    assert all(gain.grad is not None and gain.grad.item() != 0 for gain in gains(model).values())
    assert all(shaping.gamma1.dtype == torch.float64 for shaping in shapings(model))


def test_cross_attention_by_another_name():
    from transformers import Pix2StructTextConfig, Pix2StructTextModel

    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "initializer_range": 0.02,
    }
    assert len(shapings(hf.shape(Pix2StructTextModel(Pix2StructTextConfig(**sizes))))) == 2


@pytest.mark.parametrize("make", [bert, gpt2, t5])
def test_recover_ends_at_the_stock_model(make, tmp_path):
    stock, given = made(make, "sdpa"), inputs(make.__name__)
    model = hf.shape(made(make, "sdpa"), tau0=None)
    with refused("gamma1", "1"):
        hf.vanilla(model)
    Recover(3).apply(model, 3)
    plain = hf.vanilla(model)
    assert plain.config._attn_implementation == "sdpa"
    assert not shapings(plain)
    assert torch.equal(plain(**given).logits, stock(**given).logits)
    plain.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(load_saved(stock, tmp_path / "stock"))
    assert type(stock).from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    tempered = hf.shape(made(make, "sdpa"), tau0=1.0, gamma1=0.0, gamma2=0.0)
    with refused("tau0=None", "1.0"):
        hf.vanilla(tempered)


@pytest.mark.parametrize("make", [umt5, doge])
def test_recover_ends_at_a_decoder_that_is_causal(make):
    """Theirs are so in transformers' eager attention alone, whatever they had before."""
    model, given = hf.shape(made(make, "sdpa")), inputs(make.__name__)
    Recover(3).apply(model, 3)
    plain = hf.vanilla(model)
    assert {part.config._attn_implementation for part in plain.modules() if hasattr(part, "config")} == {"eager"}
    assert torch.allclose(plain(**given).logits, model(**given).logits, atol=1e-5)  # Doge has its eager softmax in float32


def test_shaped_anew():
    """The second call is as if there had been no first."""
    twice = hf.shape(hf.shape(made(bert, "sdpa"), tau0=1.0), tau0=None, learn=True, gamma1=0.3)
    once = hf.shape(made(bert, "sdpa"), tau0=None, learn=True, gamma1=0.3)
    given = inputs("bert")
    assert twice.config.shaped == once.config.shaped
    assert len(gains(twice)) == 4
    assert torch.equal(twice(**given).logits, once(**given).logits)


@pytest.mark.parametrize("make", [bert, t5])
def test_the_config_that_a_model_was_made_of_stays_as_it_was(make):
    kind, config = make()
    model, before = kind(config), config.to_dict()
    hf.shape(model)
    assert config.to_dict() == before
    assert not shapings(kind(config))
    assert all(part.config._attn_implementation == "shaped" for part in model.modules() if hasattr(part, "config"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"learn": "false"}, ["learn", "True or False", "'false'"]),
        ({"gamma1": "1"}, ["gamma1", "number", "'1'"]),
        ({"gamma_1": 0.5}, ["shaped", "gamma1", "gamma_1"]),
        (True, ["shaped", "gamma1", "True"]),
    ],
)
def test_a_config_that_was_edited_by_hand_is_checked(wrong, words, tmp_path):
    hf.shape(made(bert, "sdpa")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["shaped"] = wrong if wrong is True else config["shaped"] | wrong
    path.write_text(json.dumps(config))
    with refused(*words):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_what_cannot_be_shaped_or_made_plain_is_refused():
    with refused("ShapedConfig", "ShapedModel"):
        hf.shape(hf.ShapedModel(hf.ShapedConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)))
    with refused("shaped.hf.shape", "BertForMaskedLM"):
        hf.vanilla(made(bert))
    with refused("block", "preln"):
        hf.vanilla(hf.ShapedModel(hf.ShapedConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, block="preln")))
    with torch.device("meta"):
        kind, config = bert()
        empty = kind(config)
    with refused("meta"):
        hf.shape(empty)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_the_weight_of_the_branch(make, tmp_path):
    """It multiplies what the attention returns, also its matrices, and is saved with the model. Configs without it are read as before."""
    model, given = made(make, "sdpa").float(), inputs(make.__name__)
    full, weak = (hf.shape(copy.deepcopy(model), gamma=gamma) for gamma in (1.0, 0.25))
    one, other = (shaped(**given, output_attentions=True).attentions[0] for shaped in (full, weak))
    torch.testing.assert_close(0.25 * one, other)
    expected = weak(**given).logits
    assert not torch.equal(expected, full(**given).logits)
    weak.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(**given).logits, expected)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["shaped"].pop("gamma") == 0.25
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(type(model).from_pretrained(tmp_path)(**given).logits, full(**given).logits)
    with refused("gamma", "0.25"):
        hf.vanilla(weak)
    for wrong in (0.0, -1.0, math.nan):
        with refused("gamma", str(wrong)):
            hf.shape(model, gamma=wrong)


def test_gains_that_a_checkpoint_lacks_start_where_they_should(tmp_path):
    made(bert, "sdpa").float().save_pretrained(tmp_path)
    kind, config = bert()
    config.shaped = {"tau0": None, "learn": True, "gamma1": 0.4, "gamma2": 0.7, "instead_of": "sdpa"}
    model = kind.from_pretrained(tmp_path, config=config, attn_implementation="shaped")
    assert [gain.item() for gain in gains(model).values()] == pytest.approx([0.4, 0.7] * 2)


def test_parts_of_a_composite_model_are_loaded_shaped(tmp_path):
    from transformers import CLIPConfig, CLIPModel, CLIPTextModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    text = sizes | {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 20}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 8, "patch_size": 4}, projection_dim=8))
    hf.shape(clip.eval(), gamma1=0.4)
    clip.save_pretrained(tmp_path)
    ids = torch.randint(4, 40, (2, 9), generator=generator(6))
    part = CLIPTextModel.from_pretrained(tmp_path)
    assert part.config._attn_implementation == "shaped"
    assert torch.equal(part(ids)[0], clip.text_model(ids)[0])


class Wrapped(torch.nn.Module):
    """As PEFT's `modules_to_save` wraps a module: a frozen original, and a copy that is trained and called in its place."""

    def __init__(self, module):
        super().__init__()
        self.original_module, self.modules_to_save = module.requires_grad_(False), torch.nn.ModuleDict({"default": copy.deepcopy(module)})
        self.modules_to_save.requires_grad_(True)

    def forward(self, *args):
        return self.modules_to_save["default"](*args)


@pytest.mark.parametrize("make", [bert, llama, own])
def test_wrapped_gains_are_the_gains(make):
    model = made(own, schedule="learn") if make is own else hf.shape(made(make, "sdpa"), learn=True, gamma1=0.6)
    given = inputs(make.__name__)
    expected = model(**given).logits
    for module in list(model.modules()):
        if isinstance(getattr(module, "shaping", None), AttentionShaping):
            module.shaping = Wrapped(module.shaping)
    found = model(**given).logits
    assert torch.equal(found, expected)
    found.square().sum().backward()
    trained = {name: gain for name, gain in gains(model).items() if "modules_to_save.default.gamma" in name}
    assert len(trained) == 4
    assert all(gain.grad is not None and gain.grad.item() != 0 for gain in trained.values())


def test_wrapped_gains_can_be_taken_away():
    model, given = hf.shape(made(bert, "sdpa")), inputs("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self.shaping = Wrapped(layer.attention.self.shaping)
    Recover(3).apply(model, 3)
    plain = hf.vanilla(model)
    assert not shapings(plain)
    assert torch.equal(plain(**given).logits, made(bert, "sdpa")(**given).logits)


@pytest.mark.parametrize("wrong", [lambda: (1.0,), 1.0, lambda: "gains", "plain"])
def test_shaping_that_is_not_understood_is_refused(wrong):
    module = torch.nn.Linear(1, 1)
    module.__dict__["shaping"] = wrong
    q, k, v = torch.randn(3, 1, 2, 5, 16, generator=generator(5))
    with refused("shaping", "gamma1", "Linear"):
        attention_forward(module, q, k, v, None, is_causal=False)


def test_models_of_ones_own_around_a_stock_one():
    """Wherever their class is defined."""
    from transformers import BertModel, BertPreTrainedModel

    class Mine(BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert = BertModel(config)
            self.post_init()

    Mine.__module__ = "__main__"
    assert len(shapings(hf.shape(Mine(bert()[1])))) == 2


def test_weights_that_are_not_in_memory(tmp_path):
    """Learned gains on a disk are fetched like the weights around them."""
    model = hf.shape(made(bert, "sdpa").float(), learn=True, gamma1=0.4)
    model.save_pretrained(tmp_path / "model")
    places = {"bert.embeddings": "cpu", "bert.encoder.layer.0": "cpu", "bert.encoder.layer.1": "disk", "cls": "cpu"}
    again = type(model).from_pretrained(tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "disk"))
    given = inputs("bert")
    assert torch.allclose(again(**given).logits, model(**given).logits, atol=1e-6)


def test_a_model_that_makes_some_weights_on_the_cpu_is_loaded(tmp_path):
    """DiffLlama does, also where from_pretrained makes everything on the meta device."""
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    model = hf.shape(DiffLlamaForCausalLM(DiffLlamaConfig(**ENCODER, **TOKENS)), gamma1=0.4).eval()
    model.save_pretrained(tmp_path)
    again = DiffLlamaForCausalLM.from_pretrained(tmp_path)
    assert [shaping.gamma1.item() for shaping in shapings(again)] == pytest.approx([0.4, 0.4])
    ids = torch.arange(3, 12)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def load_saved(model, path):
    model.save_pretrained(path)
    return load_file(path / "model.safetensors")
