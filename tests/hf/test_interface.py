"""`attn_implementation="shaped"` in stock models: against the matrix written out, with padding, caches and generation."""

from functools import partial
from typing import Any

import pytest
import torch
from stock import (
    BOTH,
    DECODERS,
    ENCODER,
    ENCODERS,
    IMAGES,
    PAD,
    SILENT,
    VOCABULARY,
    bart,
    bert,
    gpt2,
    llama,
    made,
    mistral,
    own,
    umt5,
)
from transformers import DynamicCache, StaticCache

from shaped import hf
from shaped.testing.stats import generator

EVERY = ENCODERS | DECODERS | BOTH | IMAGES | {"umt5": umt5}


def tokens(batch=2, length=9, seed=0):
    return torch.randint(4, VOCABULARY, (batch, length), generator=generator(seed))


def padding(side, batch=2, length=9, pads=3):
    """A mask in which the second sequence is shorter."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if side == "right":
        mask[1, length - pads :] = 0
    else:
        mask[1, :pads] = 0
    return mask


def inputs(name, mask=None):
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator(1), dtype=torch.float64)}
    given = {"input_ids": tokens()} | ({} if mask is None else {"attention_mask": mask})
    return given | ({"decoder_input_ids": tokens(length=7, seed=2)} if name in BOTH or name == "umt5" else {})


@pytest.mark.parametrize("cache", [DynamicCache, partial(StaticCache, max_cache_len=11)], ids=["dynamic", "static"])
@pytest.mark.parametrize("level", [None, torch.finfo(torch.float64).min, -1e9, -1e4])
def test_a_mask_of_all_queries_and_keys_may_end_in_padding(level: float | None, cache: Any):
    """With a cache, and a mask that transformers takes as it is: each query keeps its own value, not its neighbour's."""
    model = made(llama)
    ids = tokens(batch=1, length=8)
    whole, kept = model(ids[:, :7]).logits, cache(config=model.config)
    model(ids[:, :5], past_key_values=kept, use_cache=True)
    mask = torch.ones(3, 8 if cache is DynamicCache else 11).tril(5).bool()[None, None].clone()
    mask[..., 7:] = mask[:, :, 2] = False  # the last new token is padding
    given: Any = mask if level is None else torch.zeros(mask.shape).double().masked_fill(~mask, level)
    rest = model(ids[:, 5:], attention_mask=given, position_ids=torch.arange(5, 8)[None], past_key_values=kept, use_cache=True).logits
    torch.testing.assert_close(rest[:, :2], whole[:, 5:])


CASES = [(name, side) for name in EVERY for side in (None, "left", "right") if name not in IMAGES or side is None]


@pytest.mark.parametrize(("name", "side"), CASES)
def test_shaped_is_the_matrix_written_out(name, side):
    mask = None if side is None else padding(side)
    given = inputs(name, mask)
    ours, reference = made(EVERY[name]), made(EVERY[name], "reference")
    stock = made(EVERY[name], "sdpa")
    found, expected, plain = (model(**given).logits for model in (ours, reference, stock))
    if mask is not None and name not in BOTH and name != "umt5":  # what stands at padding is nobody's business
        found, expected, plain = (logits[mask.bool()] for logits in (found, expected, plain))
    assert (found - expected).abs().max() < 1e-10
    assert (found - plain).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "t5"])
def test_gradients_are_those_of_the_matrix_written_out(name):
    models = [made(EVERY[name], implementation) for implementation in ("shaped", "reference")]
    for model in models:
        model(**inputs(name, padding("right"))).logits[:, 0].square().sum().backward()
    for (label, ours), (_, theirs) in zip(*(model.named_parameters() for model in models), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, atol=1e-9, rtol=1e-9), label


@pytest.mark.parametrize("name", ENCODERS)
def test_padding_changes_nothing_for_encoders(name):
    model, mask = made(ENCODERS[name]), padding("right")
    ids = tokens().masked_fill(mask == 0, PAD)
    padded = model(input_ids=ids, attention_mask=mask).logits[1, :6]
    alone = model(input_ids=ids[1:, :6]).logits[0]
    assert (padded - alone).abs().max() < 1e-10


@pytest.mark.parametrize("name", DECODERS)
def test_padding_changes_nothing_for_decoders(name):
    model, mask = made(DECODERS[name]), padding("left")
    ids = tokens().masked_fill(mask == 0, PAD)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[1, 3:]
    alone = model(input_ids=ids[1:, 3:]).logits[0]
    assert (padded - alone).abs().max() < 1e-10


@pytest.mark.parametrize("name", BOTH)
def test_padding_changes_nothing_between_encoder_and_decoder(name):
    model, mask = made(BOTH[name]), padding("right")
    ids, decoder = tokens().masked_fill(mask == 0, PAD), tokens(length=7, seed=2)
    padded = model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder).logits[1]
    alone = model(input_ids=ids[1:, :6], decoder_input_ids=decoder[1:]).logits[0]
    assert (padded - alone).abs().max() < 1e-10


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", DECODERS | BOTH)
def test_generation_does_not_depend_on_the_cache(name, padded):
    model = made((DECODERS | BOTH)[name])
    mask = padding("left") if padded else torch.ones(2, 9, dtype=torch.long)
    given = {"input_ids": tokens().masked_fill(mask == 0, PAD), "attention_mask": mask}
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": PAD}
    without, dynamic, static = (
        model.generate(**given, **settings, **cache)
        for cache in ({"use_cache": False}, {"use_cache": True}, {"cache_implementation": "static", "disable_compile": True})
    )
    assert torch.equal(dynamic, without)
    assert torch.equal(static, without)
    plain = made((DECODERS | BOTH)[name], "sdpa").generate(**given, **settings)
    assert not torch.equal(plain, without)


@pytest.mark.parametrize("make", [gpt2, llama, mistral])
def test_a_prompt_in_chunks_is_the_prompt(make):
    model, ids = made(make), tokens(length=10)
    whole = model(input_ids=ids, use_cache=False).logits
    first = model(input_ids=ids[:, :4], use_cache=True)
    second = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values)
    assert (torch.cat([first.logits, second.logits], 1) - whole).abs().max() < 1e-10


@pytest.mark.parametrize("cache", [DynamicCache, partial(StaticCache, max_cache_len=20)], ids=["dynamic", "static"])
@pytest.mark.parametrize("make", [gpt2, llama, mistral, own])
def test_chunks_may_be_padded_to_a_length(make, cache):
    """With nothing but padding at the end, a query's place is still its own: after a cached prefix, and as the first of a cache."""
    model, ids = made(make), tokens()
    expected = model(input_ids=ids, use_cache=False).logits
    mask = (torch.arange(12) < 9).long().expand(2, 12)
    padded = torch.cat([ids, torch.full((2, 3), PAD)], 1)
    whole = model(input_ids=padded, attention_mask=mask, past_key_values=cache(config=model.config)).logits
    assert (whole[:, :9] - expected).abs().max() < 1e-10
    kept = cache(config=model.config)
    model(input_ids=ids[:, :5], past_key_values=kept)
    rest = model(input_ids=padded[:, 5:], attention_mask=mask, position_ids=torch.arange(5, 12)[None], past_key_values=kept).logits
    assert (rest[:, :4] - expected[:, 5:]).abs().max() < 1e-10


def test_packed_sequences_do_not_see_one_another():
    model, ids = made(llama), tokens(batch=1, length=10)
    positions = torch.cat([torch.arange(6), torch.arange(4)])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(input_ids=part, use_cache=False).logits for part in (ids[:, :6], ids[:, 6:])], 1)
    assert (packed - apart).abs().max() < 1e-10


@pytest.mark.parametrize("mask", [None, "left", "right"])
@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_without_shaping_stock_outputs_bit_for_bit(make, mask):
    given = inputs(make.__name__, None if mask is None else padding(mask))
    stock, plain = made(make, "sdpa").float(), made(make, "sdpa").float()
    hf.shape(plain, tau0=None, gamma1=0.0, gamma2=0.0)
    expected, found = (model(**given).logits for model in (stock, plain))
    if mask is not None:
        expected, found = (logits[given["attention_mask"].bool()] for logits in (expected, found))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "t5"])
def test_attentions_can_be_looked_at(name):
    """With `output_attentions` the matrix is made, and is the one that the values are mixed with."""
    model, given = made(EVERY[name]), inputs(name, padding("right"))
    outputs = model(**given, output_attentions=True)
    assert (outputs.logits - model(**given).logits).abs().max() < 1e-10
    matrices = outputs.encoder_attentions if name in BOTH else outputs.attentions
    assert matrices[0].shape == (2, 4, 9, 9)
    rows = matrices[0][given["attention_mask"][:, None, :].expand(-1, 4, -1).bool()]
    assert torch.allclose(rows.sum(-1), torch.ones((), dtype=torch.float64))  # 1 + 1 - 1
    assert rows.min() < 0


@pytest.mark.parametrize("name", EVERY | SILENT)
def test_every_matrix_is_the_one_of_the_definition(name):
    """Self-attention and cross-attention, whether the model hands `output_attentions` on to its attention or not."""
    make, given = (EVERY | SILENT)[name], inputs(name)
    ours, reference = (made(make, implementation)(**given, output_attentions=True) for implementation in ("shaped", "reference"))
    kinds = [kind for kind in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions") if ours.get(kind)]
    assert len(kinds) == (3 if "decoder_input_ids" in given else 1)
    for kind in kinds:
        assert len(ours[kind]) == (4 if name == "modernbert" else 2)
        assert all((one - other).abs().max() < 1e-10 for one, other in zip(ours[kind], reference[kind], strict=True)), kind


@pytest.mark.parametrize("make", [bert, llama, gpt2, own])
def test_attentions_can_be_asked_for_in_the_config(make, tmp_path):
    model, ids = made(make), tokens()
    expected = model(input_ids=ids, output_attentions=True).attentions
    asked = made(make, output_attentions=True)
    model.config.output_attentions = True
    model.save_pretrained(tmp_path)
    for one in (asked, model, type(model).from_pretrained(tmp_path).double()):
        assert all((A - B).abs().max() < 1e-10 for A, B in zip(one(input_ids=ids).attentions, expected, strict=True))
    assert asked(input_ids=ids, output_attentions=False).attentions is None


def test_attentions_beside_a_fused_kernel_are_still_refused():
    config = bert()[1]
    config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="sdpa"):
        config.output_attentions = True


def test_attentions_are_those_after_dropout():
    model = made(bert, attention_probs_dropout_prob=1.0).train()
    matrices = model(input_ids=tokens(), output_attentions=True).attentions
    assert torch.allclose(matrices[0], (torch.eye(9) - 1 / 9).double().expand(2, 4, 9, 9))


@pytest.mark.parametrize("make", [bert, llama])
def test_compiled_and_checkpointed(make):
    model, given = made(make).train(), {"input_ids": tokens(length=8)}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def gradients(run):
        model.zero_grad()
        run(**given).logits.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(model)
    model.gradient_checkpointing_enable()
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(gradients(model), expected, strict=True))
    model.gradient_checkpointing_disable()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(gradients(compiled), expected, strict=True))


def test_queries_and_keys_of_one_number_are_not_taken_for_one_sequence():
    """A Q-Former, five queries on five keys: its cross-attention is of the class of its self-attention."""
    from transformers import Blip2QFormerConfig, Blip2QFormerModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "encoder_hidden_size": 16}

    def make(**kwargs):
        return Blip2QFormerModel, Blip2QFormerConfig(**sizes, cross_attention_frequency=1, **kwargs)

    queries, keys = torch.randn(2, 2, 5, 16, generator=generator(4), dtype=torch.float64)
    found, expected = (made(make, name)(queries, encoder_hidden_states=keys)[0] for name in ("shaped", "reference"))
    assert (found - expected).abs().max() < 1e-10


def test_an_encoder_that_does_not_say_that_it_sees_all_tokens():
    """Without padding its mask is None, which had been taken for the causal one."""
    from transformers import SplinterConfig, SplinterModel

    def make():
        return SplinterModel, SplinterConfig(**ENCODER)

    found, expected = (made(make, name)(tokens())[0] for name in ("shaped", "reference"))
    assert (found - expected).abs().max() < 1e-10


def test_a_prefix_that_sees_itself_whole_in_a_static_cache():
    """The queries' places are then not the last that each of them sees."""
    model, ids = made(llama), tokens(batch=1, length=6)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    allowed[:4, :4] = True
    room = torch.zeros(1, 1, 6, 10, dtype=torch.bool)
    room[..., :6] = allowed
    expected = model(input_ids=ids, attention_mask=allowed[None, None], use_cache=False).logits
    found = model(input_ids=ids, attention_mask=room, past_key_values=StaticCache(config=model.config, max_cache_len=10)).logits
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("choice", ["shaped", {"": "shaped"}])
@pytest.mark.parametrize("name", ["bert", "t5", "bart"])
def test_set_attn_implementation_reaches_every_part(name, choice):
    model, given = made(EVERY[name], "sdpa"), inputs(name)
    stock = model(**given).logits
    model.set_attn_implementation(choice)
    assert torch.equal(model(**given).logits, made(EVERY[name])(**given).logits)
    with pytest.warns(UserWarning, match="drops the shaping"):
        model.set_attn_implementation("sdpa")
    assert torch.equal(model(**given).logits, stock)


def test_cross_attention_is_known_before_shaped_is_chosen():
    model, given = made(bart, "sdpa"), inputs("bart")
    model.config._attn_implementation = "shaped"
    assert torch.equal(model(**given).logits, made(bart)(**given).logits)


def test_a_part_may_be_shaped_alone():
    from transformers import CLIPConfig, CLIPModel

    sizes = {name: size for name, size in ENCODER.items() if name != "vocab_size"}
    clip = CLIPModel(CLIPConfig(text_config=ENCODER, vision_config=sizes | {"image_size": 8, "patch_size": 4}, projection_dim=8)).eval()
    pixels = torch.randn(1, 3, 8, 8, generator=generator(5))
    text, image = clip.text_model(tokens())[0], clip.vision_model(pixels)[0]
    clip.set_attn_implementation({"text_config": "shaped"})
    assert (clip.text_model(tokens())[0] - text).abs().max() > 1e-2
    assert torch.equal(clip.vision_model(pixels)[0], image)


def test_four_dimensional_masks_of_ones_own():
    """Booleans or numbers, with the least number for what is masked, as transformers takes them."""
    model, ids = made(llama), tokens()
    allowed = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    expected = model(input_ids=ids, use_cache=False).logits
    numbers = torch.zeros(2, 1, 9, 9, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    for mask in (allowed, numbers):
        assert (model(input_ids=ids, attention_mask=mask, use_cache=False).logits - expected).abs().max() < 1e-10
    allowed = allowed.clone()
    allowed[:, :, :2] = False  # queries that see nothing
    numbers = numbers.masked_fill(~allowed, torch.finfo(torch.float64).min)
    found, expected = (model(input_ids=ids, attention_mask=mask, use_cache=False).logits for mask in (numbers, allowed))
    assert (found - expected).abs().max() < 1e-10


def test_dropout_is_of_the_softmax_alone():
    """With everything dropped, the identity and the centring are left: the same as attention whose softmax is 0."""
    model = made(bert, attention_probs_dropout_prob=1.0, hidden_dropout_prob=0.0)
    hf.shape(model, tau0=None, gamma1=1.0, gamma2=0.0)
    attention = model.bert.encoder.layer[0].attention.self.train()
    x = torch.randn(2, 5, 16, generator=generator(3), dtype=torch.float64)
    assert torch.allclose(attention(x)[0], attention.value(x))
