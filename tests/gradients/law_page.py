"""What `verify_gradients.py` found, in docs/gradients.md.

    python tests/gradients/law_page.py out/gradients.json

copies the file to docs/results and rewrites what stands between `<!-- law -->` and `<!-- end -->`. Without a file it does only that.
"""

import re
import sys
from pathlib import Path
from typing import Any

from shaped.files import read_json, write_atomically, write_json

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RESULT = DOCS / "gradients.md", DOCS / "results" / "gradients-law.json"
MARKED = re.compile(r"(?<=<!-- law -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
CONTROLS = {"gamma 5 % off": "a gamma that is 5 % off", "independent": "independent matrices"}


def read_result() -> dict[str, Any] | None:
    kinds = {"networks": int, "summary": dict, "settings": list, "independent": list, "environment": dict}
    return read_json(RESULT, **kinds) if RESULT.exists() else None


def describe(result: dict[str, Any] | None) -> str:
    """The text of the page."""
    if result is None:
        return "It has not run to its end with 100,000 networks yet.\n"
    summary, settings, device = result["summary"], result["settings"], result["environment"]["device"]
    networks, worst, farthest = f"{result['networks']:,}", summary["largest D"], summary["largest z of correlations"]
    lines = [
        f"It took {networks} networks of each kind at each of {len(settings)} settings, {result['seconds']:.0f} s on {device}"
        f" ([numbers](results/{RESULT.name})).",
        f"Found were {summary['distances']:,} Kolmogorov-Smirnov distances D and {summary['correlations']:,} differences of correlations.",
        f"By chance alone at most one run in a hundred has a p-value below {summary['rejected below p']:.1g},"
        f" which is a D above {summary['band of D']:.4f}.",
        f"Outside of that band: {len([line for line in result['wrong'] if 'p = ' in line])}.",
        f"The largest D is {worst['D']:.4f} (p = {worst['p']:.2g}), at {worst['where']}.",
        f"The p-values of D in ten equal bins: {', '.join(map(str, summary['p-values of D in ten bins']))};"
        " those of one setting depend on each other.",
        f"The differences of correlations are {summary['mean z of correlations']:.2f} standard errors in the mean, and"
        f" {summary['root mean square z of correlations']:.2f} in the root mean square.",
        f"The largest has {abs(farthest['z']):.1f}: {farthest['where']},"
        f" {farthest['autograd']:.4f} by autograd and {farthest['law']:.4f} by the law.",
        "",
        "The same comparison with wrong laws, 3 tokens, n = 16, d = 12: the largest D.",
        "",
        f"| | loss | the law | {' | '.join(CONTROLS.values())} |",
        "|---|---|---|---|---|",
    ]
    for found in settings:
        if all(control in found for control in CONTROLS):
            right = max(entry["D"] for entry in found["ks"].values())
            wrong = (f"{found[control]['D']:.4f} ({found[control]['name']})" for control in CONTROLS)
            lines.append(f"| {found['block']} | {found['loss']} | {right:.4f} | {' | '.join(wrong)} |")
    lines += [
        "",
        "How far independent matrices are from the law as the width grows, for the log squared gradient of the tokens at layer 0.",
        "The layers are shaped attention with gamma = 0.5 and tau0 = 0.5, 3 tokens, squared error; intervals are of 95 %.",
        "",
        "| n | d | D | difference of the means | ratio of the spreads |",
        "|---|---|---|---|---|",
    ]
    for row in result["independent"]:
        found = row["tokens 0"]
        cells = ("{:.3f} ({:.3f} to {:.3f})".format(*found[name]) for name in ("D", "mean difference", "spread ratio"))
        lines.append(f"| {row['n']} | {row['d']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rewrite(page: str, result: dict[str, Any] | None) -> str:
    return MARKED.sub(lambda _: describe(result), page)


def main() -> None:
    if len(sys.argv) > 1:
        write_json(RESULT, read_json(Path(sys.argv[1])))
    text = rewrite(PAGE.read_text(), read_result())
    write_atomically(PAGE, lambda file: file.write(text.encode()))


if __name__ == "__main__":
    main()
