"""What `attn_implementation="shaped"` refuses: models that would ignore it, or in which it would be another function."""

import warnings
from typing import Any

import pytest
import torch
from stock import ENCODER, TOKENS, VOCABULARY, bert, doge, made, t5, vit
from test_interface import tokens

from refusals import refused
from shaped import hf
from shaped.diagnosis.remedies.trials import takes_hf_shape
from shaped.hf.attention import bypasses_interface, find_self_attentions


def test_what_changes_the_softmax_is_refused_before_a_forward_pass():
    from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

    sizes: dict[str, Any] = ENCODER | TOKENS | {"num_key_value_heads": 2, "head_dim": 4}
    experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
    for kind, config, words in (
        (Gemma2ForCausalLM, Gemma2Config(**sizes), ("attn_logit_softcapping must be None", "Gemma2Attention of Gemma2")),
        (GptOssForCausalLM, GptOssConfig(**sizes, **experts), ("sinks must be None", "GptOssAttention of GptOss")),
    ):
        stock = kind(config)
        for call in (
            lambda stock=stock: hf.shape(stock),
            lambda stock=stock: stock.set_attn_implementation("shaped"),
            lambda kind=kind, config=config: kind._from_config(config, attn_implementation="shaped"),
        ):
            with refused(*words):
                call()
        assert not takes_hf_shape(stock)  # a diagnosis does not advise it
        assert not hasattr(stock.config, "shaped")
    plain = Gemma2ForCausalLM(Gemma2Config(**sizes, attn_logit_softcapping=None))
    assert takes_hf_shape(plain)
    hf.shape(plain)(tokens())
    for module in plain.modules():
        if hasattr(module, "attn_logit_softcapping"):
            vars(module)["attn_logit_softcapping"] = 50.0
    with refused("softcap", "Gemma2Attention"):
        plain(tokens())


def test_a_mask_that_drops_keys_is_refused_with_a_cache():
    """Doge's may drop the query's own key, which alone tells the query's position. Without a cache the positions are known."""
    ids, expected = tokens(), made(doge, "reference", keep_window_size=4)(tokens(), use_cache=False).logits
    model = made(doge, keep_window_size=4)
    assert (model(ids, use_cache=False).logits - expected).abs().max() < 1e-10
    first = model(ids, use_cache=True)
    with refused("keep_window_size", "10", "4"):
        model(ids[:, :1], past_key_values=first.past_key_values)


def test_models_that_would_ignore_it_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this model's own code is scripted
        from transformers import DebertaV2Config, DebertaV2Model
    config = DebertaV2Config(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    stock = DebertaV2Model(config)
    for call in (
        lambda: hf.shape(stock),
        lambda: stock.set_attn_implementation("shaped"),
        lambda: stock.set_attn_implementation({"": "shaped"}),
        lambda: DebertaV2Model._from_config(config, attn_implementation="shaped"),
    ):
        with refused("attn_implementation", "shaped", "DisentangledSelfAttention", "DebertaV2Model"):
            call()
    assert not hasattr(stock.config, "shaped")


def test_models_with_a_table_of_attentions_are_refused():
    """GPT-Neo, like Falcon and GPT-J, looks its attention up while it is built: a KeyError of transformers, 'shaped', said nothing."""
    from transformers import AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

    def config() -> Any:
        kinds: list[Any] = [[["global"], 1]]
        return GPTNeoConfig(vocab_size=VOCABULARY, hidden_size=16, num_layers=1, num_heads=2, attention_types=kinds, **TOKENS)

    stock = GPTNeoForCausalLM(config())
    with refused("attn_implementation", "GPTNeoSelfAttention of GPTNeo", "GPT-2 or Llama"):
        hf.shape(stock)
    for load in (AutoModelForCausalLM.from_config, GPTNeoForCausalLM._from_config):
        with refused("attn_implementation", "GPTNeoForCausalLM", "GPT-2 or Llama"):
            load(config(), attn_implementation="shaped")


def test_models_that_would_ignore_it_in_part_are_refused():
    """LongT5's encoder has attention of its own; its decoder goes through the interface."""
    from transformers import LongT5Config, LongT5Model

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}
    with refused("LongT5LocalAttention"):
        hf.shape(LongT5Model(LongT5Config(**sizes, local_radius=3)))


def mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM, MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4, **TOKENS)


def fnet() -> Any:
    from transformers import FNetConfig, FNetForMaskedLM

    sizes: dict[str, Any] = {name: value for name, value in ENCODER.items() if name != "num_attention_heads"}
    return FNetForMaskedLM, FNetConfig(**sizes)


def rwkv() -> Any:
    from transformers import RwkvConfig, RwkvForCausalLM

    return RwkvForCausalLM, RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, **TOKENS)


def test_models_without_attention_are_refused(tmp_path):
    """Who asked for shaped attention would otherwise believe that the model has it."""
    for make in (mamba, fnet, rwkv):
        kind, config = make()
        stock = kind(config)
        stock.save_pretrained(tmp_path / make.__name__)
        in_the_config = make()[1]
        in_the_config._attn_implementation = "shaped"
        for call in (
            lambda kind=kind, make=make: kind._from_config(make()[1], attn_implementation="shaped"),
            lambda kind=kind, make=make: kind.from_pretrained(tmp_path / make.__name__, attn_implementation="shaped"),
            lambda kind=kind, config=in_the_config: kind(config),
            lambda stock=stock: stock.set_attn_implementation("shaped"),
            lambda stock=stock: hf.shape(stock),
        ):
            with refused("attn_implementation='shaped' has no effect on", kind.__name__.split("For")[0], "GPT-2 or Llama"):
                call()
        assert stock.config._attn_implementation != "shaped"


def images_and_words() -> Any:
    """A ViT, which attends, beside an FNet, which does not."""
    from transformers import VisionTextDualEncoderConfig, VisionTextDualEncoderModel

    config = VisionTextDualEncoderConfig.from_vision_text_configs(vit()[1], fnet()[1], projection_dim=8)
    return VisionTextDualEncoderModel, config


def test_models_with_attention_in_some_layers_or_parts_are_shaped():
    from transformers import JambaConfig, JambaForCausalLM

    sizes: dict[str, Any] = ENCODER | {"num_key_value_heads": 2, "num_experts": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
    hybrid: Any = JambaConfig(**sizes, attn_layer_period=2, attn_layer_offset=1, **TOKENS)
    model = JambaForCausalLM._from_config(hybrid, attn_implementation="shaped")
    assert list(find_self_attentions(model)) == ["model.layers.1.self_attn"]
    kind, config = images_and_words()
    assert len(find_self_attentions(kind._from_config(config, attn_implementation="shaped"))) == 2
    with refused("no effect on JambaForCausalLM"):
        JambaForCausalLM._from_config(JambaConfig(**sizes), attn_implementation="shaped")  # its fifth layer would attend


def test_a_part_without_attention_cannot_be_the_one_that_is_shaped():
    kind, _ = images_and_words()
    model = kind(images_and_words()[1])
    for call in (
        lambda choice: model.set_attn_implementation(choice),
        lambda choice: kind._from_config(images_and_words()[1], attn_implementation=choice),
    ):
        with refused("no effect on FNetModel"):
            call({"text_config": "shaped"})
        with refused("attn_implementation", "text_config", "got 'txt_config'"):  # transformers passes over the name
            call({"txt_config": "shaped"})
    model.set_attn_implementation({"vision_config": "shaped"})
    assert [part.config._attn_implementation for part in (model.vision_model, model.text_model)] == ["shaped", "eager"]


def test_attention_over_two_sequences_is_refused_before_a_forward_pass():
    """T5Gemma 2's decoder has one softmax over its own tokens and the encoder's; it failed in transformers, in its first forward pass."""
    from transformers import T5Gemma2Config, T5Gemma2ForConditionalGeneration

    def config() -> Any:
        text: dict[str, Any] = ENCODER | TOKENS | {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 4}
        sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        encoder: dict[str, Any] = {"text_config": text, "vision_config": sizes | {"image_size": 8, "patch_size": 4}}
        return T5Gemma2Config(encoder=encoder | {"mm_tokens_per_image": 4}, decoder=dict(text), image_token_index=5)

    stock = T5Gemma2ForConditionalGeneration(config())
    for call in (
        lambda: hf.shape(stock),
        lambda: stock.set_attn_implementation("shaped"),
        lambda: T5Gemma2ForConditionalGeneration._from_config(config(), attn_implementation="shaped"),
    ):
        with refused("attn_implementation='shaped'", "T5Gemma2MergedAttention", "two sequences"):
            call()
    assert not takes_hf_shape(stock)


def test_attention_of_ones_own_is_found_in_what_a_class_inherits():
    from transformers.models.aimv2.modeling_aimv2 import Aimv2AttentionPoolingHead
    from transformers.models.bloom.modeling_bloom import BloomAttention
    from transformers.models.codegen.modeling_codegen import CodeGenAttention

    class MyAttention(BloomAttention):
        pass

    assert all(map(bypasses_interface, (BloomAttention, CodeGenAttention, MyAttention)))
    goes_through = type(made(bert).bert.encoder.layer[0].attention.self)
    assert not any(map(bypasses_interface, (goes_through, Aimv2AttentionPoolingHead)))  # the last is cross-attention, which stays plain


def test_attention_without_a_value_of_ones_own_is_refused():
    from shaped.hf.attention import attention_forward

    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    with refused("Linear", "3 queries", "5 keys"):
        attention_forward(torch.nn.Linear(1, 1), q, k, k, None, is_causal=False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hf.shape(made(bert), tau0=0.0), ["tau0", "0.0"]),
        (lambda: hf.shape(torch.nn.Linear(2, 2)), ["model", "Hugging Face", "Linear"]),  # pyright: ignore
        (lambda: hf.vanilla(torch.nn.Linear(2, 2)), ["model", "Hugging Face", "Linear"]),  # pyright: ignore
        (lambda: hf.shape(made(bert), gamma1=float("nan")), ["gamma1", "nan"]),
        (lambda: hf.shape(made(t5), gamma2=float("inf")), ["gamma2", "inf"]),
    ],
)
def test_wrong_input_is_named(call, words):
    with refused(*words):
        call()
