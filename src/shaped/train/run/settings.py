"""The settings of a pre-training run: one typed class, which is also the command line's options and the TOML file's keys."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shaped.files import read_text
from shaped.nn.activations import ACTIVATIONS, C_MINUS
from shaped.nn.blocks import BLOCKS, check_init
from shaped.nn.initialisations import INITIALISATIONS
from shaped.nn.modules import check_qk_gain
from shaped.nn.norms import DYT_ALPHA, NORMS
from shaped.nn.rotary import POSITIONS, ROPE_BASE, check_rope
from shaped.nn.schedules import SCHEDULES
from shaped.train.data.causal import BORDERS
from shaped.train.run.options import check, describe, option, read_hints
from shaped.train.step.attention_backends import CHOICES as ATTENTION
from shaped.train.step.learning_rates import DECAYS, compute_learning_rate
from shaped.train.step.objectives import OBJECTIVES
from shaped.train.step.optimisers import OPTIMISERS

TAU0 = 0.01  # found without QK-norm
MASK_SHARE = 0.15
WIDEST, DEEPEST = 1 << 20, 4096  # with more, tensors have more entries than memory has addresses, and a model takes hours to build

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"recover_steps": 4000, "tau0": 1.0, "steps": 100_000, "lr": 5e-4, "warmup": 4000, "decay": "none", "embedding_lr": 1.0},
    "best": {"qk_norm": True, "lr": 2e-3, "embedding_lr": 2.5},  # the best arm of docs/race.md, its rate tuned at 20,000 steps
    "causal": {  # the size of GPT-2; the settings of the best causal finals of a shaped arm in docs/race.md
        "objective": "causal",
        "positions": "rope",
        "qk_norm": True,
        "depth": 12,
        "heads": 12,
        "batch": 8,
        "lr": 4e-3,
        "embedding_lr": 100.0,
        "steps": 10_000,
    },
}
"""Settings by one name. They override the defaults; settings that are given override them."""


@dataclass(frozen=True)
class Settings:
    """A pre-training run. The defaults are the recipe that trained best without QK-norm; presets have others, such as the paper's."""

    data: Path = option(MISSING, "Folder made by `shaped data prepare`.", topic="data", affects="place")
    out: Path = option(MISSING, "Folder of the run; if a run was interrupted there, it continues.", topic="data", affects="place")
    objective: str = option("masked", f"What is trained. {describe(OBJECTIVES)}", topic="data", choices=tuple(OBJECTIVES))
    batch: int = option(32, "Rows of a step, over all processes.", topic="data", least=1)
    mask_share: float = option(
        MASK_SHARE, "Share of the tokens that are masked, above 0; the same number in every row, at least one.",
        topic="data", used_by="masked", low=0.0, high=1.0,
    )  # fmt: skip
    borders: str = option(
        "ignore", "respect: a token attends only within its own document, and positions restart there; slower.",
        topic="data", used_by="causal", choices=BORDERS,
    )  # fmt: skip

    model: str = option("shaped", f"Kind of block. {describe(BLOCKS)}", topic="model", choices=tuple(BLOCKS))
    schedule: str = option(
        "recover", f"How the shaping changes in training. {describe(SCHEDULES)}", topic="model", used_by="shaping", choices=tuple(SCHEDULES)
    )
    recover_steps: int = option(1000, "Recover: steps in which the shaping goes to 0.", topic="model", used_by="recover", least=1)
    norm: str = option(
        "layer", f"Norms of preln, postln and the embedding. {describe(NORMS)}", topic="model", used_by="norms", choices=tuple(NORMS)
    )
    dyt_alpha: float = option(DYT_ALPHA, "DyT: where alpha starts, in tanh(alpha x).", topic="model", used_by="dyt", low=1e-6)
    qk_norm: bool = option(False, "Divide the queries and keys of each head by their root mean square.", topic="model")
    qk_gain: bool = option(False, "QK-norm with trained gains, one vector for queries and one for keys.", topic="model")
    init: str = option(
        "theory",
        f"How the matrices of preln, postln and dyt start, and by default tables and output matrix. {describe(INITIALISATIONS)}",
        topic="model", choices=tuple(INITIALISATIONS),
    )  # fmt: skip
    depth: int = option(18, "Depth d, the number of blocks.", topic="model", least=1, most=DEEPEST)
    width: int = option(768, "Width n.", topic="model", least=1, most=WIDEST)
    heads: int = option(8, "Attention heads; they must divide the width.", topic="model", least=1, most=WIDEST)
    hidden: int | None = option(
        None, "Width inside the feed-forward layers; 4 times the width by default.", topic="model", least=1, most=4 * WIDEST
    )
    positions: str = option("learned", "A table of positions, or rotated queries and keys.", topic="model", choices=POSITIONS)
    rope_base: float = option(ROPE_BASE, "Base of the angles of rope.", topic="model", used_by="rope", low=1e-6)
    gamma: float = option(0.1, "Where the gains of the residual branches start.", topic="model", used_by="gains", low=0.0, high=1.0)
    gamma_feedforward: float | None = option(
        None, "Where the gains of the feed-forward branches start, if not at gamma.", topic="model", used_by="gains", low=0.0, high=1.0
    )
    tau0: float | None = option(
        None, "Temperature, times sqrt(n n_k); less is sharper at the start. By default 0.01, and width^-1/2, the usual one, with qk_norm.",
        topic="model", used_by="shaping", low=1e-6,
    )  # fmt: skip
    c_minus: float = option(C_MINUS, "Shaped ReLU: the negative slope starts at 1 + c_minus/sqrt(n).", topic="model", used_by="shaping")
    activation: str = option("relu", "Activation of the feed-forward layers.", topic="model", choices=tuple(ACTIVATIONS))
    train_gains: bool = option(True, "Train lambda and gamma.", topic="model", used_by="gains")
    embedding_norm: bool = option(False, "A norm on the embedding.", topic="model")
    embedding_std: float | None = option(
        None,
        "Start of the embedding tables; by default tokens + positions have variance 1, or as init says.",
        topic="model",
        low=0.0,
        high=1e3,
    )
    head_std: float | None = option(
        None, "Start of the output matrix; width^-1/2 by default, or as init says.", topic="model", low=0.0, high=1e3
    )
    tied: bool = option(
        False, "The output matrix is the tokens' embedding, times a constant, so that it starts at head_std.", topic="model"
    )

    steps: int = option(20_000, "Steps of the optimiser.", topic="optimisation", least=1)
    optimiser: str = option("adam", f"Optimiser. {describe(OPTIMISERS)}", topic="optimisation", choices=tuple(OPTIMISERS))
    lr: float = option(5e-4, "Learning rate, reached after the warm-up.", topic="optimisation", low=0.0)
    warmup: int = option(1000, "Steps in which the learning rate grows linearly.", topic="optimisation", least=0)
    decay: str = option("linear", f"Learning rate after the warm-up. {describe(DECAYS)}", topic="optimisation", choices=tuple(DECAYS))
    gain_lr: float = option(
        1.0, "Learning rate of the residual branches' lambda and gamma, times lr.", topic="optimisation", used_by="gains", low=0.0
    )
    shaping_lr: float = option(
        1.0, "Learn: learning rate of gamma1, gamma2 and the negative slopes, times lr.", topic="optimisation", used_by="learn", low=0.0
    )
    embedding_lr: float = option(10.0, "Learning rate of the embedding tables, times lr.", topic="optimisation", low=0.0)
    head_lr: float = option(
        1.0, "Learning rate of the output matrix, times lr; a tied one has the embedding's.", topic="optimisation", low=0.0
    )
    clip: float = option(0.0, "Largest norm of the gradient; 0 for no clipping.", topic="optimisation", low=0.0)
    seed: int = option(0, "Seed of the weights, the order of the rows and the masks.", topic="optimisation", least=0)

    device: str = option(
        "auto", "cpu, cuda, or auto: cuda where there is one.", topic="hardware", affects="speed", choices=("auto", "cpu", "cuda")
    )
    precision: str = option("auto", "float32, bf16, or auto: bf16 on a GPU.", topic="hardware", choices=("auto", "float32", "bf16"))
    stream: str = option(
        "bf16", "Tokens between the blocks: float32, or bf16 where the rest is.", topic="hardware", choices=("float32", "bf16")
    )
    compile: str = option(
        "auto", "Compile each block (quick to start), the whole model, or nothing; auto: blocks on a GPU.",
        topic="hardware", affects="speed", choices=("auto", "off", "blocks", "whole"),
    )  # fmt: skip
    graph: str = option(
        "auto", "The whole step as one CUDA graph; auto: on a single GPU.", topic="hardware", affects="speed", choices=("auto", "on", "off")
    )
    attention: str = option("auto", "Kernel of the attention on a GPU.", topic="hardware", affects="speed", choices=ATTENTION)

    log_every: int = option(50, "Steps between lines of metrics.jsonl.", topic="logging", affects="logging", least=1)
    evaluate_every: int = option(
        1000, "Steps between test losses; there is always one at the end.", topic="logging", affects="logging", least=1
    )
    observe_every: int = option(
        500, "Steps between lines with entropies, correlations, gradients and gains.", topic="logging", affects="logging", least=1
    )
    watch_every: int = option(
        0, "Steps between looks for signs that the run is about to die; 0 for none.", topic="logging", affects="logging", least=0
    )
    watch_stop: bool = option(False, "Stop at the first such sign, with a checkpoint.", topic="logging", affects="logging")
    checkpoint_every: int = option(1000, "Steps between checkpoints.", topic="logging", affects="logging", least=1)
    keep: int = option(2, "Checkpoints that are kept; 0 for none at all.", topic="logging", affects="logging", least=0)
    save_model: bool = option(True, "Write the trained model at the end.", topic="logging", affects="logging")
    test_rows: int = option(
        1024, "Rows of a test loss on the way; the last test loss has all rows.", topic="logging", affects="logging", least=1
    )
    minutes: float | None = option(
        None, "Stop after so many minutes, with a checkpoint; the same command continues.", topic="logging", affects="place", low=0.0
    )
    tensorboard: bool = option(True, "Write TensorBoard files where tensorboard is installed.", topic="logging", affects="logging")

    def __post_init__(self) -> None:
        check(self)
        for about in fields(self):
            if about.type == "Path":
                object.__setattr__(self, about.name, Path(getattr(self, about.name)))
        if self.mask_share == 0.0:
            raise ValueError(f"mask_share must be above 0, got {self.mask_share}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide the width, {self.width}, got {self.heads}")
        ACTIVATIONS[self.activation].from_config(float(self.c_minus))  # refuses a c_minus that it would ignore
        check_rope(self.positions, self.rope_base, self.width // self.heads)
        for name, objective, default in (("mask_share", "masked", MASK_SHARE), ("borders", "causal", "ignore")):
            if self.objective != objective and getattr(self, name) != default:
                raise ValueError(f"{name} must be {default}, its default, for the objective {self.objective}, got {getattr(self, name)}")
        if self.watch_stop and not self.watch_every:
            raise ValueError("watch_stop must be false unless watch_every is positive, got true")
        check_qk_gain(self.qk_norm, self.qk_gain)
        check_init(self.init, self.model)
        if self.tied and self.head_lr != 1.0:
            raise ValueError(f"head_lr must be 1 for a tied output matrix, which embedding_lr is for, got {self.head_lr}")
        for name in ("embedding_std", "head_std"):
            if self.tied and getattr(self, name) == 0.0:
                raise ValueError(f"{name} must be positive for a tied output matrix, got {getattr(self, name)}")
        if self.warmup >= self.steps and DECAYS[self.decay].falls:
            raise ValueError(f"warmup must be less than steps, {self.steps}, for a {self.decay} decay, got {self.warmup}")

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return compute_learning_rate(step, lr=self.lr, warmup=self.warmup, steps=self.steps, decay=self.decay)

    def choose_tau0(self) -> float:
        """The temperature, its default resolved."""
        default = self.width**-0.5 if self.qk_norm else TAU0
        return default if self.tau0 is None else self.tau0

    def find_unused(self) -> list[str]:
        """The names of settings that are not at their defaults, and that this model has no use for."""
        parts = find_parts(self.model, self.schedule, self.embedding_norm) | {self.positions, self.objective}
        unused = [about for about in fields(self) if about.metadata["used_by"] not in parts]
        return [about.name for about in unused if getattr(self, about.name) != about.default]

    def select_affecting(self, *affects: str) -> dict[str, Any]:
        """The settings that affect one of these (keys of AFFECTS), by name."""
        affecting = {about.name for about in fields(self) if about.metadata["affects"] in affects}
        return {name: value for name, value in self._resolve().items() if name in affecting}

    def record(self) -> dict[str, Any]:
        """The settings that results and records keep: all but places, by name."""
        return {name: value for name, value in self._resolve().items() if name not in PLACES}

    def _resolve(self) -> dict[str, Any]:
        """All settings by name. The temperature is a number, as in the runs that were made when its default was one."""
        return asdict(self) | {"tau0": self.choose_tau0()}

    def to_toml(self) -> str:
        """The text of a file that `from_toml` reads."""
        chosen = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items() if value is not None}
        return "".join(f"{name} = {_to_toml(value)}\n" for name, value in chosen.items())

    @classmethod
    def from_toml(cls, path: Path, **overrides: Any) -> Settings:
        """The settings of a file. `overrides` override them, and may name a preset for what neither says."""
        given = read_toml(path) | overrides
        preset = overrides.get("preset")
        # The settings.toml of a run has every setting, but those that are left to their default of None.
        if preset in PRESETS and {name for name in PRESETS[preset] if DEFAULTS[name] is not None} <= given.keys():
            names = ", ".join(PRESETS[preset])
            raise ValueError(
                f"preset must change a setting, got {preset!r}, all of whose settings {path} has already, and the file prevails: "
                f"delete from the file what the preset is to set ({names})"
            )
        try:
            return cls.of(given)
        except ValueError as error:
            raise ValueError(f"{error} (in the settings of {path})") from None

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """From settings by name, and perhaps a preset."""
        given = _resolve_preset(given)
        known = {about.name: about for about in fields(cls)}
        for name in given:
            if name not in known:
                raise ValueError(f"settings must be among {', '.join(known)}, got {name}")
        for name, about in known.items():
            if about.default is MISSING and given.get(name) is None:
                raise ValueError(f"{name} must be given: {about.metadata['help']}")
        return cls(**given)


def find_parts(model: str, schedule: str, embedding_norm: bool) -> set[str]:
    """The parts of a model that settings name in `used_by`; the empty name is a part of every model."""
    parts = {"", *BLOCKS[model].parts}
    if "shaping" in parts:
        parts.add(schedule)
    if embedding_norm and "dyt" not in parts:
        parts.add("norms")
    return parts


def _resolve_preset(given: dict[str, Any]) -> dict[str, Any]:
    """The settings that are given, and those of the preset for the rest."""
    if "preset" not in given:
        return given
    others = {name: value for name, value in given.items() if name != "preset"}
    preset = given["preset"]
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    return PRESETS[preset] | others


def _to_toml(value: Any) -> str:
    """As JSON, which is TOML except for surrogate pairs and DEL: those are escaped as TOML has it."""

    def escape(found: re.Match[str]) -> str:
        number = ord(found[0])
        return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"

    return re.sub(r"[^\x00-\x7e]", escape, json.dumps(value, ensure_ascii=False))


def read_toml(path: Path, name: str = "config") -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except FileNotFoundError as error:
        raise ValueError(f"{name} must be a TOML file, got {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not text or not a file
        raise ValueError(f"{name} must be a TOML file, got {path}: {error}") from None


def copy_option(name: str) -> Any:
    """The setting of that name, for another class of settings."""
    about = Settings.__dataclass_fields__[name]
    return field(default=about.default, metadata=about.metadata)


HINTS = read_hints(Settings)
DEFAULTS: dict[str, Any] = {about.name: about.default for about in fields(Settings) if about.default is not MISSING}
PLACES = {about.name for about in fields(Settings) if about.metadata["affects"] == "place"}
