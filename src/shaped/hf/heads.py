"""Heads for fine-tuning: a label a text, a label a token, and the span of a text that answers a question."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_outputs import (
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from shaped.hf.configuration import ShapedConfig
from shaped.hf.models import ShapedModel, ShapedPreTrainedModel
from shaped.nn.modules import make_linear


class ShapedHead(ShapedPreTrainedModel):
    """A stack, and what its heads have in common.

    transformers' own heads (`GenericForTokenClassification` and others) are not used: they have biases, their losses depend on the name of
    the class and ignore `num_items_in_batch`, and their `forward` does not name `token_type_ids`, so that Trainer drops the column.
    """

    task: ClassVar[str]
    """The name of the loss, whatever the name of a subclass."""

    def __init__(self, config: ShapedConfig):
        super().__init__(config)
        self.loss_type, self.model = self.task, ShapedModel(config)
        self._keys_to_ignore_on_load_unexpected = {r"^head\."}  # the output matrix of a language model

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        """The tokens behind the last block."""
        if self.config.is_decoder and position_ids is None and attention_mask is not None and attention_mask.ndim == 2:
            # The tokenizers of causal runs pad on the left: a text begins at position 0 all the same.
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        return self.model(input_ids, attention_mask, token_type_ids, position_ids, **kwargs)


class ShapedForSequenceClassification(ShapedHead):
    """A linear classifier on the mean of the tokens without padding; for a decoder, on the last token without padding."""

    task = "ForSequenceClassification"
    accepts_loss_kwargs = False  # the loss is a mean over the batch, so Trainer divides it by the number of accumulated batches

    def __init__(self, config: ShapedConfig):
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.classifier = make_linear(config.hidden_size, self.num_labels, config.hidden_size**-0.5)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        outputs = self.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.classifier(self.pool(outputs.last_hidden_state, attention_mask))
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    def pool(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """One vector a text, [batch, n], from its tokens, [batch, m, n]."""
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be [batch, tokens] for a classifier, got shape {tuple(attention_mask.shape)}")
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask.bool()
        if self.config.is_decoder:
            last = (real * torch.arange(1, x.shape[1] + 1, device=x.device)).argmax(-1)
            return x[torch.arange(len(x), device=x.device), last]
        weights = real / real.sum(1, keepdim=True).clamp(min=1)
        return (x * weights[..., None].to(x.dtype)).sum(1)


class ShapedForTokenClassification(ShapedHead):
    """A linear classifier on every token, such as for names in a text."""

    task = "ForTokenClassification"

    def __init__(self, config: ShapedConfig):
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.classifier = make_linear(config.hidden_size, self.num_labels, config.choose_head_std())
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """`labels`: a class a token; -100 where the loss ignores it, such as padding."""
        outputs = self.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits, count = self.classifier(outputs.last_hidden_state), kwargs.get("num_items_in_batch")
        loss = None if labels is None else self.loss_function(logits, labels, self.config, num_items_in_batch=count)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


class ShapedForQuestionAnswering(ShapedHead):
    """Two logits a token: that the answer starts there, and that it ends there.

    Those of padding are not masked, as in transformers' own models: the loss trains them to be small, and a choice has to leave them out.
    """

    task = "ForQuestionAnswering"

    def __init__(self, config: ShapedConfig):
        super().__init__(config)
        self.qa_outputs = make_linear(config.hidden_size, 2, config.choose_head_std())
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """`start_positions`, `end_positions`: the answer's first and last token, [batch].

        The loss ignores those beyond the tokens, of an answer that was cut off, and those below 0, such as -100.
        """
        outputs = self.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        start, end = (logits.contiguous() for logits in self.qa_outputs(outputs.last_hidden_state).unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            # transformers' own loss ignores what is beyond the tokens alone: it takes -100 for the first token.
            beyond = start.shape[1]
            known = (positions.where(positions >= 0, beyond) for positions in (start_positions, end_positions))
            loss = self.loss_function(start, end, *known)
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
