"""Models and calls on which a diagnosis could give wrong numbers in silence: other padding, masks, wrappers, no gradients."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from by_hand import check_attention, check_tokens
from families import FAMILIES  # pyright: ignore[reportMissingImports] (in tests/hf)
from plain_models import WIDTH, Attributes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, BertConfig, T5Config

import shaped
from refusals import refused
from shaped.diagnosis import bands, observe
from shaped.diagnosis.one_pass.unchanged import keep_random_numbers
from shaped.diagnosis.reinitialised import make_fresh_copy
from shaped.hf import shape
from shaped.nn.modules import AttentionShaping
from shaped.testing.stats import generator

X = torch.randn(2, 5, WIDTH, generator=generator(41))
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


class SelfAttention(nn.Module):
    """Adds a mask of `level` to its logits, and names the factors of its product, as Bloom does."""

    def __init__(self, level: float = -1e4):
        super().__init__()
        self.query, self.level = nn.Linear(WIDTH, WIDTH), level
        self.logits: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q = 2.0 * self.query(x)
        mask = torch.full((5, 5), self.level, dtype=x.dtype).triu(1)
        scores = mask.expand(len(x), 5, 5).baddbmm(batch1=q, batch2=q.mT, beta=1.0, alpha=1.0)
        self.logits.append(scores.detach().masked_fill(mask < 0, -torch.inf)[:, None])
        return x + scores.softmax(-1) @ x


def keep_output(module: nn.Module) -> tuple[list[Tensor], Any]:
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept.append((output[0] if isinstance(output, tuple) else output).detach())

    return kept, module.register_forward_hook(keep)


def test_padding_of_the_encoder_is_not_the_decoders():
    """Both sides have the same shape."""
    torch.manual_seed(1)
    plain = nn.Transformer(WIDTH, 2, 1, 2, 24, batch_first=True)
    kept, hook = keep_output(plain.decoder.layers[1])
    masks = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
    encoder, decoder = observe(plain, {"src": X, "tgt": X.flip(0)} | masks).stacks
    hook.remove()
    check_tokens(decoder.layers[1].tokens, kept[0])
    check_tokens(encoder.entering, X, ~PADDING)
    _, decoder = observe(plain, {"src": X, "tgt": X.flip(0), "tgt_key_padding_mask": PADDING} | masks).stacks
    check_tokens(decoder.entering, X.flip(0), ~PADDING)
    sizes: dict[str, Any] = {"vocab_size": 30, "num_heads": 2, "num_layers": 1, "d_model": 16, "d_kv": 8, "d_ff": 24}
    sizes["decoder_start_token_id"] = 0
    t5: Any = AutoModelForSeq2SeqLM.from_config(T5Config(**sizes))
    kept, hook = keep_output(t5.decoder.block[0])
    ids = torch.randint(3, 30, (2, 5), generator=generator(42))
    _, decoder = observe(t5, {"input_ids": ids, "labels": ids, "attention_mask": (~PADDING).long()}).stacks
    hook.remove()
    check_tokens(decoder.layers[0].tokens, kept[0])


def test_padding_that_only_a_models_own_softmax_masks():
    """Its name in the batch says nothing, and tokens there are alike."""

    class Masking(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
            self.logits = (self.query(x) @ x.mT).masked_fill(~tokens[:, None], -1e9)
            self.output = x + self.logits.softmax(-1) @ x
            return self.output

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList((Masking(), Masking()))

        def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, tokens)
            return x

    torch.manual_seed(3)
    model = Model()
    (stack,) = observe(model, {"x": X, "tokens": ~PADDING}).stacks
    last: Any = model.layers[1]
    check_tokens(stack.layers[1].tokens, last.output, ~PADDING)
    check_attention(stack.layers[1].attention["Masking"], last.logits[:, None].masked_fill(PADDING[:, None, None], -torch.inf), ~PADDING)


@pytest.mark.parametrize(("level", "dtype"), [(-1e4, torch.float64), (-1e9, torch.float64), (-1e4, torch.bfloat16)])
def test_masks_that_are_added_to_large_logits(level: float, dtype: torch.dtype):
    torch.manual_seed(2)
    model: Any = nn.Sequential(SelfAttention(level), SelfAttention(level)).to(dtype)
    (stack,) = observe(model, X.to(dtype)).stacks
    (call,) = stack.layers[0].attention.values()
    assert call.uniform_entropy[0] == pytest.approx(sum(math.log(keys) for keys in range(1, 6)) / 5)
    if dtype is torch.float64:
        check_attention(call, model[0].logits[0])
        assert call.largest_logit[0] > 5.0


def test_gradients_are_measured_where_the_caller_has_switched_them_off():
    torch.manual_seed(3)
    model = Attributes()
    usual, bands = observe(model, X), shaped.diagnose(model, X, seeds=1).bands
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert observe(model, X).stacks[0].layers == usual.stacks[0].layers
            assert shaped.diagnose(model, X.clone(), seeds=1).bands == bands  # of a copy, with a batch that was made there
    assert "no weight matrix has a gradient of it" in observe(model.requires_grad_(False), X).loss_kind
    assert "gradient" not in usual.loss_kind


def test_a_default_device_is_for_the_caller_alone():
    """As after torch.set_default_device("cuda"), with a model on the CPU: the projection of the output had failed."""
    torch.manual_seed(3)
    model = nn.Sequential(Attending(), Attending())
    usual = shaped.diagnose(model, X, seeds=2, remedies=True).to_json()
    with torch.device("meta"):
        assert shaped.diagnose(model, X, seeds=2, remedies=True).to_json() == usual


class Attending(nn.Module):
    """It makes no tensor of its own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.attention(x, x, x, need_weights=False)[0])


def test_a_loss_without_a_gradient_is_refused_or_told():
    torch.manual_seed(3)
    model = Attributes()
    with refused("loss must depend on the model's output", "got 3 without a gradient"):
        observe(model, X, lambda output, batch: torch.tensor(3.0))
    found = shaped.diagnose(model, X, loss=lambda output, batch: (0.0 * output).sum() + 3.0, seeds=0, remedies=True)
    assert [finding.name for finding in found.verdicts] == ["no gradients"]


def test_a_model_of_transformers_in_a_wrapper_is_drawn_by_its_own_code():
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=30, initializer_range=3.0
    )
    wrapped = nn.DataParallel(AutoModel.from_config(config))
    weight = make_fresh_copy(wrapped, 0).get_parameter("module.encoder.layer.0.output.dense.weight").detach()
    assert float(weight.std()) == pytest.approx(3.0, abs=5 * 3.0 / (2 * weight.numel()) ** 0.5)
    ids = torch.randint(3, 30, (2, 5), generator=generator(43))
    assert shaped.diagnose(wrapped, {"input_ids": ids}, seeds=1).bands.source == "1 copy with fresh weights, drawn by init_weights"


def test_fewer_copies_of_a_large_model(monkeypatch):
    torch.manual_seed(4)
    model = Attributes()
    seen = observe(model, X)
    assert bands.choose_copies(model, X, seen) == bands.SEEDS
    monkeypatch.setattr(bands, "LONG", 3.5 * sum(p.numel() for p in model.parameters()) * 2 * 5)
    assert bands.choose_copies(model, X, seen) == 3
    assert shaped.diagnose(model, X).bands.source == "3 copies with fresh weights, drawn by each module's reset_parameters"
    assert shaped.diagnose(model, X, seeds=4).bands.source.startswith("4 copies")
    monkeypatch.setattr(bands, "LONG", 0.0)
    assert bands.choose_copies(model, X, seen) == 2


def test_a_prediction_with_a_soft_cap_is_not_the_band_of_fused_attention():
    torch.manual_seed(5)
    ids = torch.randint(3, 30, (1, 6), generator=generator(44))
    for implementation, word in (("sdpa", "1 copy"), ("eager", "predicted")):
        model: Any = AutoModel.from_config(FAMILIES["gemma2"](16, 2), attn_implementation=implementation)
        assert word in shaped.diagnose(model, {"input_ids": ids}, seeds=1).bands.source


def test_no_tokens_and_broken_input():
    for x in (X[:, :0], X[:0]):
        with refused("batch", "Attributes", "it has no tokens"):
            observe(Attributes(), x)
    assert observe(Attributes(), X * torch.nan).non_finite == "tokens that enter first"


def test_a_batch_that_holds_no_tensors_is_told_so():
    config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model, ids = AutoModel.from_config(config), torch.arange(8).view(2, 4)
    lists = ids.tolist()  # as a tokenizer returns them without return_tensors
    for batch, words in (
        ({"input_ids": lists, "attention_mask": ids}, "takes, in tensors, got input_ids a list of numbers, attention_mask [2, 4]: "),
        (lists, "takes, in tensors, got a list of numbers: "),
        ((ids, ids, lists, "text"), "takes, in tensors, got ([2, 4], [2, 4], a list of numbers, 'text'): "),
        (ids.numpy(), "takes, in tensors, got a numpy array [2, 4]: "),
        ((ids, "text"), "takes, got ([2, 4], 'text'): "),
    ):
        with refused("batch must be what BertModel", words):
            observe(model, batch)


def test_random_numbers_of_the_models_gpus_are_kept_too(monkeypatch):
    kept: list[list[int]] = []
    plain = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: kept.append(list(devices)) or plain(devices=[]))
    places = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:1", "cpu", "cuda:0")]
    with keep_random_numbers(SimpleNamespace(parameters=lambda: places, buffers=list)):  # pyright: ignore[reportArgumentType]
        torch.rand(())
    make_fresh_copy(Attributes(), 0)
    assert kept == [[0, 1], []]


def test_a_prediction_is_not_the_band_of_a_model_with_gains_set_by_hand():
    """The config says that every attention is shaped alike. Only copies have what was changed in one of them."""
    ids = torch.randint(3, 30, (1, 6), generator=generator(45))
    for by_name in (True, False):
        model: Any = AutoModel.from_config(FAMILIES["llama"](16, 2), attn_implementation="shaped" if by_name else "sdpa")
        model = model if by_name else shape(model, gamma1=0.9)
        for changed, word in ((False, "predicted"), (AttentionShaping(0.5, 0.5), "1 copy"), (None, "1 copy")):
            if changed is not False:
                model.layers[0].self_attn.shaping = changed
            assert word in shaped.diagnose(model, {"input_ids": ids}, seeds=1).bands.source


class Borrower(nn.Module):
    """Another model, with the config of a Llama."""

    def __init__(self):
        super().__init__()
        self.config, self.model = FAMILIES["llama"](16, 2), Attributes()
        self.table = nn.Embedding(self.config.vocab_size, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(self.table(input_ids))


def make_changed_llama(change: str) -> Any:
    model: Any = AutoModel.from_config(FAMILIES["llama"](16, 2))
    if change == "a norm":
        model.layers[1].input_layernorm = nn.Identity()
    elif change == "an epsilon":
        model.layers[1].input_layernorm.variance_epsilon = 10.0
    elif change == "a width":
        mlp = model.layers[1].mlp
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(16, 7, False), nn.Linear(16, 7, False), nn.Linear(7, 16, False)
    return model


@pytest.mark.parametrize("change", ["", "a norm", "an epsilon", "a width", "all"])
def test_a_prediction_is_not_the_band_of_a_model_that_its_config_does_not_make(change: str):
    torch.manual_seed(9)
    model = Borrower() if change == "all" else make_changed_llama(change)
    source = shaped.diagnose(model, {"input_ids": IDS}, seeds=1).bands.source
    assert ("4 models predicted" in source) is not bool(change)


IDS = torch.randint(3, 30, (2, 6), generator=generator(46))
ORDER, ONES, SEGMENTS = torch.arange(6), torch.ones_like(IDS), torch.tensor([0, 0, 0, 1, 1, 1]).expand(2, 6)
CAUSAL = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
PADDED = torch.tensor([1, 1, 1, 1, 0, 0]).expand(2, 6)


@pytest.mark.parametrize(
    ("family", "given", "predicted"),
    [
        ("bert", {"labels": IDS, "attention_mask": PADDED, "token_type_ids": 0 * IDS, "position_ids": ORDER[None]}, True),
        ("bert", {"attention_mask": ONES.tril(3)}, False),  # four and five tokens
        ("bert", {"token_type_ids": SEGMENTS}, False),
        ("gpt2", {"token_type_ids": 0 * IDS}, False),  # it adds the embedding of token 0 to all
        ("llama", {"position_ids": ORDER[None] + 3, "use_cache": False}, True),
        ("llama", {"position_ids": (ORDER % 3)[None], "use_cache": False}, False),  # two packed sequences
        ("llama", {"attention_mask": CAUSAL}, False),
        ("llama", {"inputs_embeds": None, "attention_mask": ONES}, True),
    ],
)
def test_a_prediction_is_not_the_band_of_a_batch_with_more_than_ids(family: str, given: dict[str, Any], predicted: bool):
    """Segments share an embedding, packed sequences do not see one another, a mask may be anything, short sequences have other bands."""
    torch.manual_seed(6)
    model: Any = (AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM).from_config(FAMILIES[family](16, 2))
    source = shaped.diagnose(model, {"input_ids": IDS} | given, seeds=1).bands.source
    assert ("predicted" in source) is predicted
    assert ("1 copy" in source) is not predicted


class Experts(nn.Module):
    """Attention, then one of four experts for each token: a router that sends every token to the first one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + nn.functional.scaled_dot_product_attention(x, x, x)
        chosen, out = torch.zeros(x.shape[:2], dtype=torch.long), x.clone()
        for number, expert in enumerate(self.experts):
            out[chosen == number] += expert(x[chosen == number])
        return out


def test_an_expert_without_tokens_is_not_dead():
    torch.manual_seed(7)
    model: Any = nn.Sequential(Experts(), Experts())
    inside: list[Tensor] = []
    hook = model[0].experts[0][0].register_forward_hook(lambda module, args, output: inside.append(output.detach()))
    found = shaped.diagnose(model, X, seeds=0)
    hook.remove()
    assert found.layers[0]["dead"] == pytest.approx(float((inside[0] <= 0).all(0).double().mean()))
    assert "dead units" not in [finding.name for finding in found.verdicts]


def test_weights_that_two_layers_share_have_their_gradient_in_both():
    """Else the second layer would seem to be frozen, or to have a gradient that vanishes."""
    torch.manual_seed(8)
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True) for _ in range(2)]
    first, second = layers
    second.linear1.weight, second.linear2.weight = first.linear1.weight, first.linear2.weight
    second.self_attn.requires_grad_(False)
    model: Any = nn.Sequential(*layers)
    model.another_name = first.linear1  # counts once
    rows = shaped.diagnose(model, X, loss=lambda output, batch: output.square().mean() + output.sum(), seeds=0).layers
    output = model(X)
    (output.square().mean() + output.sum()).backward()
    norms = {name: float(p.grad.norm()) for name, p in first.named_parameters() if p.grad is not None}
    for row, names in zip(rows, (("self_attn.in_proj_weight", "self_attn.out_proj.weight"), ()), strict=True):
        assert row["gradients"] == pytest.approx({name: norms[name] for name in (*names, "linear1.weight", "linear2.weight")}, rel=1e-4)
    with shaped.watch(model, every=1) as watcher:
        output = model(X)
        model.zero_grad()
        (output.square().mean() + output.sum()).backward()
        watcher.step(None)
    assert list(watcher.rows[0].quantities["gradient"].values()) == pytest.approx([row["gradient"] for row in rows], rel=1e-4)


def test_sharded_weights_are_refused():
    """Their gradients had been missing, and no rule about gradients was judged."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True) for _ in range(2)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        fully_shard(model[1])
        with refused("model must be whole", "Sequential"):
            observe(model, X)
    finally:
        dist.destroy_process_group()


class MaskFirst(nn.Module):
    """Takes its mask before its tokens, and changes the tokens in place."""

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return x.add_(nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0])


class MasksFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MaskFirst() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            x = layer(mask=torch.full((2, 1, 5, 5), -1e9).triu(1), x=x)
        return x


def test_what_enters_a_layer_is_not_the_mask_that_it_takes_first():
    (stack,) = observe(MasksFirst(), X).stacks
    check_tokens(stack.entering, X)


class MaybeAttends(nn.Module):
    def __init__(self, attends: bool):
        super().__init__()
        self.attends = attends

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.scaled_dot_product_attention(x, x, x) if self.attends else x + x.roll(1, 1)


def test_what_enters_the_first_layer_that_attends():
    """In hybrid models it is not the first layer of all."""
    model = nn.Sequential(*map(MaybeAttends, (False, True, False, True)))
    (stack,) = observe(model, X).stacks
    assert [layer.name for layer in stack.layers] == ["1", "3"]
    check_tokens(stack.entering, model[0](X))
    check_tokens(stack.layers[-1].tokens, model(X))
