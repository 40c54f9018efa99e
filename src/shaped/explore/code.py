"""The Python code and the command for what the page shows."""

from __future__ import annotations

from shaped.explore.fields import Question
from shaped.explore.plan import LAST, RESAMPLES, Plan


def write_python(asked: Question) -> str:
    """A program whose numbers are those of the page's last stage."""
    plan = Plan(asked, LAST)
    more = f", heads={asked.heads}, project=True" if asked.project else ""
    more += f", mask={asked.mask!r}" if asked.mask != "none" else ""
    more += ", qk_norm=True" if asked.qk_norm else ""
    return f"""\
import shaped

n, d, seed = {asked.width}, {asked.depth}, {asked.seed}
block = shaped.ShapedAttention(gamma={asked.gamma!r}, tau0={asked.tau0!r}{more}) >> shaped.ShapedFeedForward(
    gamma={asked.gamma!r}, c_plus={asked.c_plus!r}, c_minus={asked.c_minus!r}
)
V0 = shaped.equicorrelated(m={asked.tokens}, rho={asked.rho!r})


def mean_rho(V):
    rho, m = shaped.correlation(V), V.shape[-1]
    return (rho.sum((-2, -1)) - m) / (m * (m - 1))


# Correlation, its density at the last layer, the largest eigenvalue: the SDE and networks, with all numbers of the last stage.
limit = shaped.solve(
    block, V0, T=d / n, steps={plan.steps}, samples={plan.paths}, seed=seed, record={plan.record_steps}, upper=1e4, check=False
)
network = shaped.propagate(block, V0, n=n, d=d, samples={plan.networks}, seed=seed, record={plan.record}, upper=1e4)
median = {{}}
for name, paths in (("SDE", limit), ("networks", network)):
    median[name] = mean_rho(paths.V[-1][paths.stopped > paths.t[-1]]).quantile(0.5).item()
    print(f"{{name}}: median of the mean correlation at the last layer {{median[name]:.5g}}, exploding {{paths.stopped_share:.3%}}")
print(shaped.compare(limit, network, statistics={{"mean rho": mean_rho}}, resamples={RESAMPLES}, seed=seed))


# Gradients: squared norms by layer, of which the page shows the roots.
def loss(outputs):
    return outputs.square().sum((-2, -1)) / 2


gradients = shaped.backpropagate(block, V0, n=n, d=d, outputs=1, loss=loss, samples={plan.differentiated}, seed=seed)
first, last = gradients.tokens[0].sqrt(), gradients.tokens[-1].sqrt()
print(f"norm of the gradient: {{first.nanquantile(0.5):.5g}} at the first tokens, {{last.nanquantile(0.5):.5g}} at the last")

# The other blocks beside the shaped one.
attention, feedforward = shaped.ShapedAttention(1.0{more}, lam=1.0).unshaped, shaped.ReLUFeedForward(1.0, lam=1.0)
blocks = {{
    "shaped": block,
    "unshaped": shaped.ShapedAttention({asked.gamma!r}{more}).unshaped >> shaped.ReLUFeedForward({asked.gamma!r}),
    "Pre-LN": shaped.PreLN(attention) >> shaped.PreLN(feedforward),
    "Post-LN": shaped.PostLN(attention) >> shaped.PostLN(feedforward),
}}
for name, one in blocks.items():
    paths = shaped.propagate(one, V0, n=n, d=d, samples={plan.compared}, seed=seed, record={plan.record})
    tokens = shaped.backpropagate(one, V0, n=n, d=d, outputs=1, loss=loss, samples={plan.compared_differentiated}, seed=seed).tokens
    ratio = (tokens[0] / tokens[-1]).sqrt().nanquantile(0.5)
    print(f"{{name}}: mean correlation {{mean_rho(paths.V[-1]).quantile(0.5):.5g}}, gradient at the first tokens over last {{ratio:.5g}}")
"""


def write_command(asked: Question) -> str:
    """The SDE of what is shown, from the command line."""
    plan = Plan(asked, LAST)
    options = [
        f"--width {asked.width} --depth {asked.depth} --tokens {asked.tokens}",
        f"--gamma {asked.gamma!r} --tau0 {asked.tau0!r} --c-plus {asked.c_plus!r} --c-minus {asked.c_minus!r} --rho {asked.rho!r}",
        f"--heads {asked.heads} --project" if asked.project else "",
        f"--mask {asked.mask}" if asked.mask != "none" else "",
        "--qk-norm" if asked.qk_norm else "",
        f"--step {asked.time / plan.steps!r} --samples {plan.paths} --seed {asked.seed}",
    ]
    return " ".join(["shaped simulate", *filter(None, options)])
