"""The losses of the package's models: of subclasses with any name, and with Trainer's label smoothing."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from shaped.hf import (
    ShapedConfig,
    ShapedForCausalLM,
    ShapedForMaskedLM,
    ShapedForQuestionAnswering,
    ShapedForSequenceClassification,
    ShapedForTokenClassification,
)
from shaped.testing.stats import generator


class Storyteller(ShapedForCausalLM):
    """The suffix of this name says nothing."""


class GapFiller(ShapedForMaskedLM):
    """Nor does this one's."""


class JudgeForCausalLM(ShapedForSequenceClassification):
    """This one says something wrong."""


class TaggerForMaskedLM(ShapedForTokenClassification):
    """As does this one's."""


class Oracle(ShapedForQuestionAnswering):
    """The suffix of this name says nothing."""


IDS = torch.randint(1, 20, (2, 9), generator=generator(0))


def make(kind, **kwargs) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(ShapedConfig(**sizes, **kwargs)).eval().requires_grad_(False)


def pair_up(kind, logits):
    """Logits and the tokens that they are for."""
    return (logits[:, :-1], IDS[:, 1:]) if issubclass(kind, ShapedForCausalLM) else (logits, IDS)


@pytest.mark.parametrize("kind", [ShapedForCausalLM, Storyteller, ShapedForMaskedLM, GapFiller])
def test_label_smoothing_trains_towards_the_same_tokens_as_the_loss(kind, tmp_path):
    """Trainer had shifted no labels of a causal model, which then learned to repeat its input."""
    model = make(kind)
    arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.2, use_cpu=True, report_to=[])
    found: Any = Trainer(model=model, args=arguments).compute_loss(model, {"input_ids": IDS, "labels": IDS.clone()})
    logits, wanted = pair_up(kind, model(IDS).logits)
    assert float(found) == pytest.approx(float(cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=0.2)), rel=1e-5)


@pytest.mark.parametrize("kind", [Storyteller, GapFiller])
def test_the_loss_of_a_language_model_does_not_depend_on_its_name(kind):
    outputs = make(kind)(IDS, labels=IDS)
    logits, wanted = pair_up(kind, outputs.logits)
    assert float(outputs.loss) == pytest.approx(float(cross_entropy(logits.flatten(0, 1), wanted.flatten())), rel=1e-5)


def test_the_loss_of_a_classifier_does_not_depend_on_its_name():
    labels = torch.tensor([1, 0])
    outputs = make(JudgeForCausalLM, num_labels=2)(IDS, labels=labels)
    assert float(outputs.loss) == pytest.approx(float(cross_entropy(outputs.logits, labels)), rel=1e-5)


def test_the_loss_of_a_token_classifier_is_that_of_the_tokens_with_a_label():
    labels = (IDS % 3).masked_fill(torch.arange(9) > 5, -100)
    outputs = make(TaggerForMaskedLM, num_labels=3)(IDS, labels=labels)
    expected = cross_entropy(outputs.logits[:, :6].flatten(0, 1), (IDS % 3)[:, :6].flatten())
    assert float(outputs.loss) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("beyond", [9, -100])
def test_the_loss_of_an_answer_is_that_of_its_two_ends_if_they_are_in_the_text(beyond):
    """transformers' own loss takes -100 for the first token."""
    given = {"start_positions": torch.tensor([2, beyond]), "end_positions": torch.tensor([4, 7])}
    outputs = make(Oracle)(IDS, **given)
    start, end = (cross_entropy(outputs.start_logits[:1], torch.tensor([2])), cross_entropy(outputs.end_logits, torch.tensor([4, 7])))
    assert float(outputs.loss) == pytest.approx(float(start + end) / 2, rel=1e-5)
    columns = make(Oracle)(IDS, **{name: positions[:, None] for name, positions in given.items()})
    assert torch.equal(columns.loss, outputs.loss)
