"""Hooks on attention, the observation of a forward pass, and the registry of diagnostic quantities."""

import threading
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from shaped.hf import DiagnosticsCallback, ShapedConfig, ShapedForMaskedLM
from shaped.hf.observation import QuantityRecorder
from shaped.nn.attention_hooks import AttentionInputs, register_attention_hook
from shaped.nn.diagnostics import QUANTITIES, Source, attention_entropy, quantity
from shaped.testing.stats import generator
from shaped.train.run.diagnostics import observe

IDS = torch.randint(2, 40, (4, 12), generator=generator(11))


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ShapedForMaskedLM(ShapedConfig(**sizes, max_position_embeddings=12, gamma=0.3)).eval()


def attention_of(model: Any, layer: int) -> torch.nn.Module:
    return model.model.layers[layer].block.attention


def test_hooks_belong_to_one_module_nest_and_end():
    model, other = make_model(), make_model()
    seen: list[str] = []
    outer = register_attention_hook(attention_of(model, 0), lambda module, inputs: seen.append("outer"))
    inner = register_attention_hook(attention_of(model, 0), lambda module, inputs: seen.append("inner"))
    model(IDS)
    other(IDS)
    assert seen == ["outer", "inner"]
    outer()
    outer()  # a second time it has nothing to remove
    model(IDS)
    assert seen == ["outer", "inner", "inner"]
    inner()
    model(IDS)
    assert seen == ["outer", "inner", "inner"]
    assert not hasattr(attention_of(model, 0), "attention_hooks")


def test_observations_in_threads_see_their_own_model():
    models = [make_model(seed) for seed in range(3)]
    expected = [observe(model, IDS, {})["entropy"] for model in models]
    found: dict[int, list[float]] = {}
    start = threading.Barrier(len(models))

    def work(i: int) -> None:
        start.wait()
        for _ in range(3):
            found[i] = observe(models[i], IDS, {})["entropy"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(models))] == expected
    assert expected[0] != expected[1]


def test_an_observation_within_another_and_an_error_leave_no_hook():
    model = make_model()
    with QuantityRecorder(model) as outer:
        with QuantityRecorder(model, sequences=2) as inner:
            model(IDS)
        with pytest.raises(ZeroDivisionError), QuantityRecorder(model):
            raise ZeroDivisionError
    few = make_model()
    with QuantityRecorder(few) as alone:
        few(IDS[:2])
    assert inner.values == alone.values
    assert outer.values.keys() == inner.values.keys() == {"model.layers.0", "model.layers.1"}
    assert outer.values != inner.values
    assert not any(hasattr(module, "attention_hooks") for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("shape", [(5, 5), (2, 5, 5), (1, 1, 5, 5), (4, 1, 5, 5)])
def test_a_mask_of_any_shape_goes_with_the_first_sequences(shape):
    """The rows of a mask for all sequences had been taken for sequences: with one sequence the first row hid the others."""
    g = generator(3)
    q, k = (torch.randn(4, 2, 5, 8, generator=g) for _ in range(2))
    mask = torch.rand(shape, generator=g) < 0.5
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    for sequences in (1, 3):
        seen = AttentionInputs(q, k, 1.0, mask, False).first(sequences)
        found = attention_entropy(seen.q, seen.k, scale=1.0, attn_mask=seen.mask)
        assert torch.equal(found, attention_entropy(q, k, scale=1.0, attn_mask=mask)[:sequences])


def test_the_first_pass_counts():
    """Accumulated batches and gradient checkpointing run the layers again."""
    model = make_model()
    with QuantityRecorder(model) as seen:
        model(IDS)
        first = {name: dict(values) for name, values in seen.values.items()}
        model(IDS.flip(0)[:2])
    assert seen.values == first


def test_without_hooks_attention_compiles_whole_and_hooks_come_and_go():
    model = make_model()
    layer, x = model.model.layers[0], torch.randn(1, 12, 16, generator=generator(12))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    expected = layer(x)
    assert torch.equal(compiled(x), expected)
    scales: list[float] = []
    remove = register_attention_hook(attention_of(model, 0), lambda module, inputs: scales.append(inputs.scale))
    assert torch.equal(compiled(x), expected)
    assert scales == [8**-0.5]
    remove()
    assert torch.equal(compiled(x), expected)
    assert len(scales) == 1


def test_an_observed_model_is_compiled_whole_afterwards():
    """Trainer compiles in its first step, which is observed: the program of all later steps had a gap at every hook."""
    graphs: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    model, plain = make_model(), make_model()
    with QuantityRecorder(plain) as expected:
        logits = plain(IDS).logits
    compiled = torch.compile(model, backend=count)
    with QuantityRecorder(model) as seen:
        compiled(input_ids=IDS)
    assert not graphs
    assert seen.values == expected.values
    assert torch.allclose(compiled(input_ids=IDS).logits, logits, atol=1e-5)
    whole = len(graphs)
    with QuantityRecorder(model):
        compiled(input_ids=IDS)
    assert len(graphs) == whole == 1


def test_a_new_quantity_is_one_function(tmp_path):
    """It is measured by training and by the callback, with nothing else changed."""

    @quantity("length", "", Source.TOKENS)
    def mean_length(x: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        return x.norm(dim=-1).mean()

    try:
        model = make_model()
        seen = observe(model, IDS, {})["length"]
        states = model(IDS, output_hidden_states=True).hidden_states
        assert seen == pytest.approx([mean_length(state).item() for state in states[1:]])  # pyright: ignore
        callback = DiagnosticsCallback(every=1)
        about = TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
        rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
        Trainer(model=model, args=about, train_dataset=rows, callbacks=[callback]).train()  # pyright: ignore[reportArgumentType]
        assert callback.history[0]["length"]["model.layers.1"] == pytest.approx(seen[1])
        with pytest.raises(ValueError, match="'length'"):
            quantity("length", "", Source.TOKENS)(mean_length)
    finally:
        del QUANTITIES["length"]


def test_quantities_have_labels_for_pictures():
    assert QUANTITIES["entropy"].label == "entropy (nats)"
    assert QUANTITIES["correlation"].label == "correlation"
