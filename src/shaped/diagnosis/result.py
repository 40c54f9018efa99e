"""Diagnosis: what `diagnose` returns."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shaped.diagnosis.bands import Bands
from shaped.diagnosis.curves import list_curves
from shaped.diagnosis.observation import Observation
from shaped.diagnosis.page import render_page
from shaped.diagnosis.remedies import Trials
from shaped.diagnosis.verdicts import NOTICES, Finding, Verdicts, measure_risk
from shaped.files import make_folder, replace_non_finite, write_atomically, write_json

FILE, PAGE = FILES = ("diagnosis.json", "diagnosis.html")


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What a model does to its tokens and gradients, layer by layer, and what is wrong with that."""

    observation: Observation
    bands: Bands
    findings: tuple[Finding, ...]
    """What every rule found, the farthest beyond its threshold first."""
    info: dict[str, Any] = field(default_factory=dict)
    """Facts: the model's class, its parameters, the batch."""
    remedies: Trials | None = None
    """What was tried for each verdict; None if nothing was to be tried. Printable."""

    @property
    def risk(self) -> float:
        """From 0 to 1: 1/2 or more where a threshold is reached, or where several are near (`shaped.diagnosis.verdicts`)."""
        return measure_risk(self.findings)

    @property
    def verdicts(self) -> Verdicts:
        """The findings beyond their thresholds, worst first; printable."""
        return Verdicts(finding for finding in self.findings if finding.at_risk)

    @property
    def remark(self) -> str:
        """Where risk is 1/2 or more without a verdict that counts: the values that make it, in words. Else empty."""
        counted = [finding for finding in self.findings if finding.name not in NOTICES]
        if self.risk < 0.5 or any(finding.at_risk for finding in counted):
            return ""
        nearest = ", ".join(f"{finding.name} {10.0**finding.decades:.2f}" for finding in counted[:3])
        return f"no threshold that counts is reached, but several are near, and the odds add up (1 at a threshold): {nearest}"

    @property
    def unseen(self) -> str:
        """Where the residual stream was not found, in words; empty if it was found everywhere."""
        return "; ".join(stack.unseen for stack in self.observation.stacks if stack.unseen)

    @property
    def layers(self) -> list[dict[str, Any]]:
        """One row a layer: what leaves it, its curves' values, entropies and largest logit of each head, the gradient of each matrix."""
        rows = []
        for stack in self.observation.stacks:
            curves = list_curves(stack)
            for number, layer in enumerate(stack.layers):
                row: dict[str, Any] = {"stack": stack.name, "layer": number + 1, "name": layer.name}
                row |= {name: values[number + len(values) - len(stack.layers)] for name, values in curves.items()}
                heads = {
                    name: {
                        "entropy": list(call.entropy),
                        "uniform_entropy": list(call.uniform_entropy),
                        "largest_logit": list(call.largest_logit),
                        "largest_share": call.largest_share,
                    }
                    for name, call in layer.attention.items()
                }
                rows.append(row | {"heads": heads, "gradients": dict(layer.gradients)})
        return rows

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it: a number that is not finite is None."""
        stacks = {
            stack.name: {
                "curves": list_curves(stack),
                "bands": {name: asdict(band) for name, band in self.bands.stacks.get(stack.name, {}).items()},
                "unseen": stack.unseen,
            }
            for stack in self.observation.stacks
        }
        return replace_non_finite(
            {
                "info": self.info,
                "risk": self.risk,
                "remark": self.remark,
                "verdicts": [asdict(finding) for finding in self.verdicts],
                "findings": [asdict(finding) for finding in self.findings],
                "remedies": None if self.remedies is None else [asdict(trial) | {"outcome": trial.outcome} for trial in self.remedies],
                "loss": {"value": self.observation.loss, "kind": self.observation.loss_kind},
                "bands_source": self.bands.source,
                "stacks": stacks,
                "layers": self.layers,
            }
        )

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Writes diagnosis.json and diagnosis.html, one self-contained page; returns the files."""
        folder = Path(folder)
        make_folder(folder, "folder")
        content = self.to_json()
        page = render_page(content).encode()
        write_json(folder / FILE, content)
        write_atomically(folder / PAGE, lambda file: file.write(page))
        return [folder / FILE, folder / PAGE]

    def __repr__(self) -> str:
        count = sum(len(stack.layers) for stack in self.observation.stacks)
        without = "several thresholds are near" if self.remark else "no risk found"
        names = ", ".join(finding.name for finding in self.verdicts) or without
        names += f"; {self.unseen}" if self.unseen else ""
        return f"Diagnosis({self.info.get('model', 'model')}, {count} layers, risk {self.risk:.2f}: {names})"
