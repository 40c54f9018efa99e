"""The package's own models: their law at initialisation, saving and loading, generation, and what they are called by Auto classes."""

import json
import math
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from refusals import refused
from shaped.hf import (
    ShapedConfig,
    ShapedForCausalLM,
    ShapedForMaskedLM,
    ShapedForQuestionAnswering,
    ShapedForSequenceClassification,
    ShapedForTokenClassification,
    ShapedModel,
    vanilla,
)
from shaped.hf.configuration import SWITCHES
from shaped.nn import Recover, ShapedEncoder, gains
from shaped.testing.stats import generator

VOCABULARY, N, DEPTH, HEADS = 40, 32, 3, 4
FINE_TUNED = (ShapedForSequenceClassification, ShapedForTokenClassification, ShapedForQuestionAnswering)
BLOCKS = ["shaped", "vanilla", "preln", "postln", "dyt"]


def config(**kwargs):
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": N, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    return ShapedConfig(**(sizes | {"max_position_embeddings": 24, "gamma": 0.4} | kwargs))


def made(kind, seed=0, **kwargs) -> Any:
    torch.manual_seed(seed)
    return kind(config(**kwargs)).eval()


def tokens(batch=2, length=9, seed=0):
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator(seed))


PADDING = torch.ones(2, 9, dtype=torch.long)
PADDING[1, 6:] = 0


def test_with_qk_norm_the_output_is_proportional_to_the_tables():
    """No bias, and no norm sees the length of the stream: docs/race.md says that smaller tables are a slower output matrix."""
    model = made(ShapedForCausalLM, qk_norm=True, positions="rope").double()
    before = model(tokens()).logits
    with torch.no_grad():
        model.model.embedding.tokens.weight.mul_(0.02)
    assert torch.allclose(model(tokens()).logits / 0.02, before, rtol=0.0, atol=0.01)  # eps makes 0.003, no QK-norm 0.18


def test_the_stack_is_the_encoder_of_shaped_nn():
    model, encoder = made(ShapedModel), ShapedEncoder(DEPTH, N, HEADS, gamma=0.4)
    renamed = {name.replace("layers.", "blocks.").replace(".block.", "."): value for name, value in model.state_dict().items()}
    encoder.load_state_dict({name: value for name, value in renamed.items() if name.startswith("blocks")})
    x = model.embedding(model.embedding.tokens(tokens()), torch.arange(9)[None], None)
    assert torch.equal(model(tokens()).last_hidden_state, encoder(x))


def test_initial_tokens_have_unit_variance_and_keep_it():
    """5 standard errors: V^aa of n features of a token scatters by sqrt(2/n), and tokens of one model are nearly independent."""
    model = made(ShapedModel, hidden_size=512, num_hidden_layers=4, gamma=0.2, vocab_size=400)
    ids = torch.randint(0, 400, (4, 24), generator=generator(1))
    outputs = model(ids, output_hidden_states=True)
    for states in (outputs.hidden_states[0], outputs.last_hidden_state):
        assert states.square().mean().item() == pytest.approx(1.0, abs=5 * math.sqrt(2 / 512))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        (ShapedModel, AutoModel),
        (ShapedForMaskedLM, AutoModelForMaskedLM),
        (ShapedForCausalLM, AutoModelForCausalLM),
        (ShapedForSequenceClassification, AutoModelForSequenceClassification),
        (ShapedForTokenClassification, AutoModelForTokenClassification),
        (ShapedForQuestionAnswering, AutoModelForQuestionAnswering),
    ],
)
def test_saved_and_loaded(kind, auto, block, tmp_path):
    model = made(kind, block=block, num_labels=3, schedule="learn", embedding_norm=True, type_vocab_size=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert isinstance(AutoConfig.from_pretrained(tmp_path), ShapedConfig)
    for again in (kind.from_pretrained(tmp_path), auto.from_pretrained(tmp_path)):
        assert type(again) is kind
        assert again.config._attn_implementation == "shaped"
        assert torch.equal(again(tokens(), attention_mask=PADDING)[0], model(tokens(), attention_mask=PADDING)[0])
    eager = kind.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.allclose(eager(tokens(), attention_mask=PADDING)[0], model(tokens(), attention_mask=PADDING)[0], atol=1e-5)
    with pytest.warns(UserWarning, match="drops the shaping") if block == "shaped" else nullcontext():
        plain = kind.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert plain.config._attn_implementation == "sdpa"
    assert torch.allclose(plain(tokens())[0], model(tokens())[0], atol=1e-5) == (block != "shaped")


def test_what_a_checkpoint_lacks_starts_as_it_should(tmp_path):
    """A classifier on a pre-trained body: the body's weights and gains are loaded, the head has variance 1/n."""
    body = made(ShapedForMaskedLM, schedule="learn")
    with torch.no_grad():
        for gain in gains(body).values():
            gain.add_(0.25)
    body.save_pretrained(tmp_path)
    model = ShapedForSequenceClassification.from_pretrained(tmp_path, num_labels=200)
    assert all(torch.equal(value, body.model.state_dict()[name]) for name, value in model.model.state_dict().items())
    weights = model.classifier.weight
    assert weights.square().mean().item() * N == pytest.approx(1.0, abs=5 * math.sqrt(2 / weights.numel()))
    with pytest.warns(UserWarning, match="ShapedForCausalLM has causal attention, the saved ShapedForMaskedLM had not"):
        decoder: Any = ShapedForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(decoder.head.weight, body.head.weight)


@pytest.mark.parametrize("block", BLOCKS)
def test_padding_changes_nothing(block):
    ids = tokens()
    for kind, is_decoder in ((ShapedForMaskedLM, False), *((kind, is_decoder) for kind in FINE_TUNED for is_decoder in (False, True))):
        model = made(kind, block=block, is_decoder=is_decoder).double()
        padded, alone = model(ids, attention_mask=PADDING).to_tuple(), model(ids[1:, :6], use_cache=False).to_tuple()
        for one, other in zip(padded, alone, strict=True):
            assert (one[1, : len(other[0])] - other[0]).abs().max() < 1e-10


def test_a_decoder_does_not_look_ahead_and_an_encoder_does():
    for kind, looks in ((ShapedForCausalLM, False), (ShapedForMaskedLM, True)):
        model, ids = made(kind), tokens()
        changed = ids.clone()
        changed[:, -1] += 1 - 2 * (changed[:, -1] == VOCABULARY - 1).long()
        assert torch.allclose(model(ids).logits[:, :-1], model(changed).logits[:, :-1], atol=1e-6) != looks


def test_losses_are_the_usual_ones():
    ids = tokens()
    masked, causal = made(ShapedForMaskedLM), made(ShapedForCausalLM)
    labels = ids.masked_fill(torch.arange(9) % 3 != 0, -100)
    expected = torch.nn.functional.cross_entropy(masked(ids).logits.flatten(0, 1), labels.flatten())
    assert masked(ids, labels=labels).loss.item() == pytest.approx(expected.item(), rel=1e-6)
    shifted = torch.nn.functional.cross_entropy(causal(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert causal(ids, labels=ids).loss.item() == pytest.approx(shifted.item(), rel=1e-6)
    given = ids.flip(-1)  # shifted by whoever cut the sequences into parts
    expected = torch.nn.functional.cross_entropy(causal(ids).logits.flatten(0, 1), given.flatten())
    assert causal(ids, labels=ids, shift_labels=given).loss.item() == pytest.approx(expected.item(), rel=1e-6)
    classifier = made(ShapedForSequenceClassification, num_labels=3)
    own = torch.nn.functional.cross_entropy(classifier(ids).logits, torch.tensor([0, 2]))
    assert classifier(ids, labels=torch.tensor([0, 2])).loss.item() == pytest.approx(own.item(), rel=1e-6)
    assert causal(ids, logits_to_keep=1).logits.shape == (2, 1, VOCABULARY)


def test_embeddings_can_be_tied_resized_and_given():
    model = made(ShapedForMaskedLM, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.resize_token_embeddings(VOCABULARY + 5)
    assert model(tokens()).logits.shape[-1] == VOCABULARY + 5
    embedded = model.get_input_embeddings()(tokens())
    assert torch.equal(model(inputs_embeds=embedded).logits, model(tokens()).logits)
    with refused("input_ids", "inputs_embeds", "both"):
        model(tokens(), inputs_embeds=embedded)
    types = made(ShapedModel, type_vocab_size=2)
    assert torch.equal(types(tokens())[0], types(tokens(), token_type_ids=torch.zeros(2, 9, dtype=torch.long))[0])
    assert not torch.equal(types(tokens())[0], types(tokens(), token_type_ids=torch.ones(2, 9, dtype=torch.long))[0])


@pytest.mark.parametrize("stds", [{}, {"head_std": 0.02}, {"embedding_std": 0.3}, {"type_vocab_size": 2}])
def test_a_tied_head_starts_like_one_of_its_own(stds):
    """Logits of variance n head_std²; 5 standard errors, as if the 16 tokens were dependent and the 400 words not."""
    n = 256
    model = made(ShapedForMaskedLM, hidden_size=n, gamma=0.2, vocab_size=400, tie_word_embeddings=True, **stds)
    ids = torch.randint(0, 400, (1, 16), generator=generator(2))
    x = model.model(ids).last_hidden_state
    logits = model(ids).logits.masked_fill(torch.nn.functional.one_hot(ids, 400).bool(), 0.0)  # but for each token's own
    per_token = logits.square().sum(-1) / (399 * x.square().mean(-1))
    wanted = n * stds.get("head_std", n**-0.5) ** 2
    assert per_token.mean().item() == pytest.approx(wanted, rel=5 * math.sqrt(2 / 399))


@pytest.mark.parametrize("block", ["shaped", "preln"])
def test_eager_is_the_same_attention_with_its_matrices(block):
    model, eager = (made(ShapedForCausalLM, block=block, attn_implementation=name).double() for name in ("shaped", "eager"))
    for given in ({"attention_mask": PADDING}, {"attention_mask": PADDING.flip(-1)}, {}):
        expected, found = (one(tokens(), output_attentions=True, **given) for one in (model, eager))
        real = given.get("attention_mask", torch.ones_like(PADDING)).bool()
        assert (expected.logits - found.logits)[real].abs().max() < 1e-10
        assert len(found.attentions) == DEPTH
        assert all((A - B).abs().max() < 1e-10 for A, B in zip(expected.attentions, found.attentions, strict=True))
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": PADDING.flip(-1)}
    assert torch.equal(eager.generate(tokens(), **settings), model.generate(tokens(), **settings))


@pytest.mark.parametrize("kind", [ShapedModel, ShapedForCausalLM, *FINE_TUNED])
def test_what_quantises_models_finds_every_matrix(kind):
    """bitsandbytes, torchao and PyTorch's own replace what is exactly an `nn.Linear`."""
    model = made(kind)
    matrices = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert matrices == 6 * DEPTH + (kind is not ShapedModel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own is to be torchao's
        quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert sum(module._get_name() == "DynamicQuantizedLinear" for module in quantised.modules()) == matrices
    error = (quantised(tokens())[0] - model(tokens())[0]).abs().max()
    assert 0 < error < 0.2


def test_words_that_are_added_start_like_the_others():
    """5 standard errors."""
    model = made(ShapedForCausalLM, hidden_size=256, head_std=0.02, embedding_std=0.3)
    model.resize_token_embeddings(VOCABULARY + 20, mean_resizing=False)
    for table, std in ((model.get_input_embeddings(), 0.3), (model.get_output_embeddings(), 0.02)):
        assert table.weight[VOCABULARY:].std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * 20 * 256))


def test_hidden_states_attentions_compilation_and_checkpointing():
    model, ids = made(ShapedForMaskedLM).double(), tokens()
    outputs = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(outputs.hidden_states) == DEPTH + 1
    assert [a.shape for a in outputs.attentions] == [(2, HEADS, 9, 9)] * DEPTH
    assert torch.allclose(outputs.logits, model(ids).logits, atol=1e-10)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(ids).logits, model(ids).logits, atol=1e-10)

    def gradients():
        model.zero_grad()
        model.train()(ids, labels=ids).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    model.gradient_checkpointing_enable()
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(gradients(), expected, strict=True))


def test_recover_ends_at_a_vanilla_model(tmp_path):
    model, ids = made(ShapedForMaskedLM, schedule="recover", recover_steps=5), tokens()
    schedule = model.config.shaping()
    assert schedule == Recover(5)
    with refused("gamma1", "layers.0"):
        vanilla(model)
    schedule.apply(model, 5)
    plain = vanilla(model)
    assert plain.config.block == "vanilla"
    assert torch.equal(plain(ids).logits, model(ids).logits)
    plain.save_pretrained(tmp_path)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "shaping" in name or "slope" in name]
    assert torch.equal(AutoModelForMaskedLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_a_config_is_not_changed_by_the_models_made_of_it():
    shared = config()
    causal, masked = ShapedForCausalLM(shared), ShapedForMaskedLM(shared)
    assert (shared.is_decoder, causal.config.is_decoder, masked.config.is_decoder) == (False, True, False)
    assert not ShapedForMaskedLM(causal.config).config.is_decoder


def test_the_last_token_of_a_long_sequence_in_half_precision():
    model = made(ShapedForSequenceClassification, is_decoder=True, max_position_embeddings=400).bfloat16()
    ids = tokens(batch=1, length=400)
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 7) % VOCABULARY
    assert not torch.equal(model(ids).logits, model(changed).logits)


def test_more_tokens_than_positions_are_refused():
    with refused("input_ids", "24", "25"):
        made(ShapedModel)(tokens(length=25))
    with refused("position_ids", "23", "24"):
        made(ShapedForCausalLM).generate(tokens(), max_new_tokens=20, do_sample=False)
    for wrong in (24, -1):
        with refused("position_ids", "23", str(wrong)):
            made(ShapedModel)(tokens(), position_ids=torch.full((1, 9), wrong))


def test_a_classifier_wants_to_know_which_tokens_are_padding():
    with refused("attention_mask", "(2, 1, 9, 9)"):
        made(ShapedForSequenceClassification)(tokens(), attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))


@pytest.mark.parametrize("kind", FINE_TUNED)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_causal_classifier_does_not_see_padding(kind, side):
    """Nor by the tokens' positions: the tokenizers of causal runs pad on the left."""
    model, ids = made(kind, is_decoder=True).double(), tokens()
    pads = (4, 0) if side == "left" else (0, 4)
    padded, mask = (torch.nn.functional.pad(x, pads) for x in (ids, torch.ones_like(ids)))
    found, expected = model(padded, attention_mask=mask)[0], model(ids)[0]
    found = found if found.shape == expected.shape else found[mask.bool()].view_as(expected)
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("use_cache", [False, None])
def test_packed_sequences_may_be_more_tokens_than_positions(use_cache):
    """By default a cache is made. Packed sequences had then seen one another."""
    model, ids = made(ShapedForCausalLM).double(), tokens(batch=1, length=36)
    positions = torch.arange(12).repeat(3)[None]
    packed = model(ids, position_ids=positions, use_cache=use_cache).logits
    apart = model(ids.view(3, 12), use_cache=False).logits
    assert (packed.view_as(apart) - apart).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"block": "prenorm"}, ["block", "preln", "prenorm"]),
        ({"schedule": "forget"}, ["schedule", "recover", "forget"]),
        ({"num_attention_heads": 5}, ["num_attention_heads", "32", "5"]),
        ({"recover_steps": 0}, ["recover_steps", "0"]),
        ({"gamma": 1.5}, ["gamma", "1.5"]),
        ({"tau0": 0.0}, ["tau0", "0.0"]),
        ({"tie_word_embeddings": True, "embedding_std": 0.0}, ["embedding_std", "0.0"]),
        ({"type_vocab_size": -1}, ["type_vocab_size", "-1"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"attention_dropout": -0.1}, ["attention_dropout", "-0.1"]),
        ({"hidden_size": None}, ["hidden_size", "whole number", "None"]),
        ({"gamma_feedforward": "x"}, ["gamma_feedforward", "number", "x"]),
        ({"c_minus": 1e50}, ["c_minus", "1e+30", "1e+50"]),
        ({"activation": "gelu", "c_minus": -2.0}, ["c_minus", "-1.0", "gelu", "-2.0"]),
        ({"tau0": 1e-50}, ["tau0", "1e-30", "1e-50"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "10000", "1000000000"]),
        *(({name: "false"}, [name, "True or False", "'false'"]) for name in SWITCHES),
        ({"train_gains": 0}, ["train_gains", "True or False", "0"]),
        ({"vocab_size": 10**12}, ["sizes", "1e+12 weights", "3.2e+13"]),
    ],
)
def test_wrong_settings_are_named(wrong, words):
    with refused(*words):
        config(**wrong)


def test_settings_of_numpy_and_torch_are_saved_as_numbers(tmp_path):
    """As a sweep over numpy's numbers gives them: such a model trained, and then could not be saved."""
    swept = config(hidden_size=np.uint8(80), gamma=np.float32(0.5), head_std=torch.tensor(0.25), c_minus=np.int8(-1), qk_norm=np.True_)
    swept.save_pretrained(tmp_path)
    usual = config(hidden_size=80, gamma=0.5, head_std=0.25, c_minus=-1.0, qk_norm=True)
    assert usual.intermediate_size == 320  # 64 in 8 bits
    assert swept.to_dict() == usual.to_dict()
    saved = AutoConfig.from_pretrained(tmp_path)
    assert saved.to_dict() == usual.to_dict() | {name: getattr(saved, name) for name in ("transformers_version", "_name_or_path")}


@pytest.mark.parametrize("load", [AutoConfig.from_pretrained, AutoModel.from_pretrained, ShapedModel.from_pretrained])
def test_a_file_that_asks_for_too_much_is_refused_before_memory_is_taken(load, tmp_path):
    made(ShapedModel).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**9}))
    with refused("num_hidden_layers", "10000", "1000000000"):
        load(tmp_path)
