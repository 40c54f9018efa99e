"""The package's models for transformers' own tests; `run.py` runs them. A test that is skipped says why in one line."""

from __future__ import annotations

import unittest
from typing import Any, ClassVar

import torch
from tests.generation.test_utils import GenerationTesterMixin  # pyright: ignore[reportMissingImports]
from tests.test_configuration_common import ConfigTester  # pyright: ignore[reportMissingImports]
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask  # pyright: ignore[reportMissingImports]
from transformers.models.auto import modeling_auto

from shaped.hf import (
    ShapedConfig,
    ShapedForCausalLM,
    ShapedForMaskedLM,
    ShapedForQuestionAnswering,
    ShapedForSequenceClassification,
    ShapedForTokenClassification,
    ShapedModel,
)

# The tests know by these tables which labels a class takes, and that a model without a head takes none.
tables: Any = modeling_auto
tables.MODEL_MAPPING_NAMES["shaped"] = "ShapedModel"
tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES["shaped"] = "ShapedForMaskedLM"
tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["shaped"] = "ShapedForCausalLM"
tables.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["shaped"] = "ShapedForSequenceClassification"
tables.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES["shaped"] = "ShapedForTokenClassification"
tables.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES["shaped"] = "ShapedForQuestionAnswering"
HEADS = (ShapedForSequenceClassification, ShapedForTokenClassification, ShapedForQuestionAnswering)


class Tester:
    """A tiny model and a batch for it."""

    batch_size, seq_length, is_training = 3, 7, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size = 99, 32, 2, 4, 37

    def __init__(self, parent: unittest.TestCase, **settings: Any):
        self.parent, self.settings = parent, settings

    def get_config(self) -> ShapedConfig:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        given: dict[str, Any] = {name: getattr(self, name) for name in sizes}
        given |= {"max_position_embeddings": 64, "num_labels": 3, "bos_token_id": 1, "eos_token_id": 2} | self.settings
        return ShapedConfig(**given)

    def prepare_config_and_inputs_for_common(self) -> tuple[ShapedConfig, dict[str, torch.Tensor]]:
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": random_attention_mask([self.batch_size, self.seq_length])}


class Common(ModelTesterMixin):
    settings: ClassVar[dict[str, Any]]

    def setUp(self) -> None:
        self.model_tester = Tester(self, **self.settings)
        self.config_tester = ConfigTester(self, config_class=ShapedConfig, hidden_size=32, num_attention_heads=4)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    @unittest.skip("the attention of these models is 'shaped' unless another is asked for; the test wants 'sdpa' to be the default")
    def test_sdpa_can_dispatch_non_composite_models(self) -> None: ...


class Shaped(Common):
    @unittest.skip("'sdpa' is another function: it takes the shaping away, and says so; for PreLN blocks, where it is the same, this runs")
    def test_eager_matches_sdpa_inference(self) -> None: ...


for name in [name for name in dir(ModelTesterMixin) if name.startswith("test_eager_matches_sdpa_inference_")]:
    setattr(Shaped, name, Shaped.test_eager_matches_sdpa_inference)


class Encoder(Shaped, unittest.TestCase):
    all_model_classes = (ShapedModel, ShapedForMaskedLM, *HEADS)
    settings: ClassVar[dict[str, Any]] = {}


class Decoder(Shaped, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (ShapedModel, ShapedForCausalLM, *HEADS)
    settings: ClassVar[dict[str, Any]] = {"is_decoder": True}


class PreLN(Common, GenerationTesterMixin, unittest.TestCase):
    """A block without shaping, for which "sdpa" and "eager" are kernels of one function."""

    all_model_classes = (ShapedModel, ShapedForCausalLM)
    settings: ClassVar[dict[str, Any]] = {"is_decoder": True, "block": "preln"}


class Rotary(Decoder):
    settings: ClassVar[dict[str, Any]] = Decoder.settings | {"positions": "rope", "qk_norm": True, "qk_gain": True}


class RMSNorm(PreLN):
    settings: ClassVar[dict[str, Any]] = PreLN.settings | {"norm": "rms", "positions": "rope", "qk_norm": True, "qk_gain": True}


class DyT(PreLN):
    settings: ClassVar[dict[str, Any]] = PreLN.settings | {"block": "dyt", "qk_norm": True, "embedding_norm": True}
