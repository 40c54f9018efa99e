"""Settings of the Hugging Face models of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from shaped.checks import SINGLE, check_bool, finite, in_range, keep, positive, whole_number
from shaped.hf.attention import NAME
from shaped.nn.activations import ACTIVATIONS, C_MINUS
from shaped.nn.blocks import BLOCKS, check_init
from shaped.nn.initialisations import INITIALISATIONS
from shaped.nn.modules import DEEPEST, check_qk_gain
from shaped.nn.norms import DYT_ALPHA, NORMS
from shaped.nn.rotary import POSITIONS, ROPE_BASE, check_rope
from shaped.nn.schedules import SCHEDULES, Recover, Schedule

LARGEST_MODEL = 10**12  # weights; no machine has memory for more
CHOICES: dict[str, Iterable[str]] = {
    "block": BLOCKS,
    "norm": NORMS,
    "init": INITIALISATIONS,
    "schedule": SCHEDULES,
    "activation": tuple(ACTIVATIONS),
    "positions": POSITIONS,
}
SWITCHES = ("qk_norm", "qk_gain", "train_gains", "is_decoder", "embedding_norm", "use_cache", "tie_word_embeddings")


class ShapedConfig(PreTrainedConfig):
    r"""A shaped Transformer or a baseline. Sizes have the usual names of Hugging Face configs.

    Args:
        block: "shaped" (Eq. shaped_transformer), "vanilla" (without shaping, as after Recover), "preln", "postln", or "dyt" (preln with
            DyT in place of its norms).
        norm: "layer" or "rms": the norm of preln, of postln and of `embedding_norm`.
        dyt_alpha: where DyT's alpha starts.
        qk_norm, qk_gain: divide each head's queries and keys by their root mean square; multiply them by trained vectors then.
        init: how the matrices of preln, postln and dyt start: "theory", "bert" (0.02 everywhere) or "gpt2" (0.02, and residual outputs
            divided by sqrt(2 num_hidden_layers)). The last two are also the defaults of embedding_std and head_std.
        positions: "learned" (a table of max_position_embeddings rows) or "rope" (queries and keys are rotated, after QK-norm). With rope
            max_position_embeddings is the length that the model was trained with; longer inputs are not refused.
        rope_base: the base of the angles of rope.
        gamma: initial gain of the residual branches; the shortcuts start at sqrt(1 - gamma²).
        gamma_feedforward: initial gain of the feed-forward branches; gamma by default.
        tau0: temperature of shaped attention, and of vanilla attention with QK-norm. By default 1, the paper's; with QK-norm
            hidden_size^-1/2, the usual one, since there logits stay below sqrt(n_k/hidden_size)/tau0: with tau0 = 1 attention could never
            select a token.
        activation: one of `shaped.nn.activations.ACTIVATIONS`, shaped in the blocks that are shaped, plain in the others.
        c_minus: the negative slope of the shaped ReLU starts at 1 + c_minus/sqrt(hidden_size).
        schedule: the shaping is "fixed", trained ("learn") or annealed to 0 in `recover_steps` steps ("recover").
        train_gains: train the residual gains.
        is_decoder: causal attention; `ShapedForCausalLM` sets it.
        embedding_norm: a norm on the embedding.
        embedding_std: initial standard deviation of the tables of tokens and positions; by default their sum has variance 1, or they
            start as `init` says.
        head_std: initial standard deviation of the output matrix; hidden_size^-1/2 by default, or as `init` says.
        tie_word_embeddings: the output matrix is the table of tokens times a constant, chosen so that it starts at head_std.
        type_vocab_size: number of token types (sentence pairs); 0 for none.
        attention_dropout, hidden_dropout: of the softmax, and of the embedding.
    """

    model_type: ClassVar[str] = NAME
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 32_000
    hidden_size: int = 768
    num_hidden_layers: int = 18
    num_attention_heads: int = 8
    intermediate_size: int | None = None
    max_position_embeddings: int = 512
    positions: str = "learned"
    rope_base: float = ROPE_BASE
    block: str = "shaped"
    norm: str = "layer"
    dyt_alpha: float = DYT_ALPHA
    qk_norm: bool = False
    qk_gain: bool = False
    init: str = "theory"
    gamma: float = 0.1
    gamma_feedforward: float | None = None
    tau0: float | None = None
    c_minus: float = C_MINUS
    activation: str = "relu"
    schedule: str = "fixed"
    recover_steps: int = 4000
    train_gains: bool = True
    is_decoder: bool = False
    embedding_norm: bool = False
    embedding_std: float | None = None
    head_std: float | None = None
    type_vocab_size: int = 0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        keep(self, whole_number, "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "max_position_embeddings")
        keep(self, whole_number, "recover_steps")
        keep(self, whole_number, "num_hidden_layers", most=DEEPEST)
        keep(self, whole_number, "type_vocab_size", least=0)
        self.intermediate_size = 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size
        if self.weights() > LARGEST_MODEL:
            raise ValueError(f"sizes must make at most {LARGEST_MODEL:g} weights, got a config of {self.weights():g}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"num_attention_heads must divide hidden_size, {self.hidden_size}, got {self.num_attention_heads}")
        keep(self, check_bool, *SWITCHES)  # Python takes "no" and "false" for True
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        keep(self, in_range, "gamma", "gamma_feedforward", "attention_dropout", "hidden_dropout", low=0.0, high=1.0)
        keep(self, in_range, "embedding_std", "head_std", low=0.0, high=1e3)
        if self.tie_word_embeddings:
            keep(self, positive, "embedding_std", "head_std")
        if self.tau0 is None:
            self.tau0 = self.hidden_size**-0.5 if self.qk_norm else 1.0
        keep(self, positive, "tau0", "dyt_alpha", "rope_base", most=SINGLE)
        keep(self, finite, "c_minus", most=SINGLE)
        self._refuse_ignored()
        ACTIVATIONS[self.activation].from_config(self.c_minus)  # refuses a c_minus that it would ignore
        super().__post_init__(**kwargs)

    def _refuse_ignored(self) -> None:
        """Refuses what the block has no use for."""
        parts = BLOCKS[self.block].parts
        if self.norm != "layer" and "norms" not in parts and (not self.embedding_norm or "dyt" in parts):
            raise ValueError(f"norm must be 'layer', its default, for {self.block} blocks, which have no norms, got {self.norm!r}")
        if self.dyt_alpha != DYT_ALPHA and "dyt" not in parts:
            raise ValueError(
                f"dyt_alpha must be {DYT_ALPHA}, its default, for {self.block} blocks, which have no DyT, got {self.dyt_alpha}"
            )
        check_qk_gain(self.qk_norm, self.qk_gain)
        check_init(self.init, self.block)
        check_rope(self.positions, self.rope_base, self.hidden_size // self.num_attention_heads)

    def weights(self) -> int:
        """Entries of the tables and of the blocks' matrices."""
        tables = self.vocab_size + (self.positions == "learned") * self.max_position_embeddings + self.type_vocab_size
        return self.hidden_size * (tables + self.num_hidden_layers * (4 * self.hidden_size + 2 * (self.intermediate_size or 0)))

    def choose_table_std(self) -> float:
        """The initial standard deviation of the embeddings' entries."""
        usual = INITIALISATIONS[self.init].std
        tables = 1 + (self.positions == "learned") + bool(self.type_vocab_size)
        default = tables**-0.5 if usual is None else usual
        return default if self.embedding_std is None else self.embedding_std

    def choose_head_std(self) -> float:
        """The initial standard deviation of the output matrix's entries."""
        usual = INITIALISATIONS[self.init].std
        default = self.hidden_size**-0.5 if usual is None else usual
        return default if self.head_std is None else self.head_std

    def shaping(self) -> Schedule:
        """The schedule of gamma1, gamma2 and the activation's slope."""
        kind = SCHEDULES[self.schedule]
        return Recover(self.recover_steps) if kind is Recover else kind()
