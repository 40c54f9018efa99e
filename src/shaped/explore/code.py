"""The Python code and the command for what the page shows."""

from __future__ import annotations

from shaped.explore.fields import Question
from shaped.explore.plan import LAST, Plan


def write_python(asked: Question) -> str:
    """A program whose numbers are those of the page's last stage."""
    plan = Plan(asked, LAST)
    mask = "" if asked.mask == "none" else f", mask={asked.mask!r}"
    attention = f"tau0={asked.tau0!r}" + (f", heads={asked.heads}, project=True" if asked.project else "") + mask
    attention += ", qk_norm=True" if asked.qk_norm else ""
    return f"""\
import shaped

n, d, seed = {asked.width}, {asked.depth}, {asked.seed}
attention = shaped.ShapedAttention(gamma={asked.gamma!r}, {attention})
block = attention >> shaped.ShapedFeedForward(gamma={asked.gamma!r}, c_plus={asked.c_plus!r}, c_minus={asked.c_minus!r})
V0 = shaped.equicorrelated(m={asked.tokens}, rho={asked.rho!r})


def mean_rho(V):
    rho, m = shaped.correlation(V), V.shape[-1]
    return (rho.sum((-2, -1)) - m) / (m * (m - 1))


# Panels "Correlation", "Largest eigenvalue" and "Entropy of attention": the SDE and networks.
limit = shaped.solve(block, V0, T=d / n, steps={plan.steps}, samples={plan.paths}, seed=seed, record={plan.record_steps}, upper=1e4)
network = shaped.propagate(block, V0, n=n, d=d, samples={plan.networks}, seed=seed, record={plan.record}, upper=1e4)
median = {{name: mean_rho(one.V[-1][one.stopped > one.t[-1]]).median().item() for name, one in (("SDE", limit), ("networks", network))}}
print("median of the mean correlation at the last layer:", median)
print("share that explodes:", limit.stopped_share, network.stopped_share)
print(shaped.compare(limit, network, statistics={{"mean rho": mean_rho}}, resamples=100, seed=seed))

# Panel "Gradients": squared norms by layer; the page shows their roots.
gradients = shaped.backpropagate(
    block, V0, n=n, d=d, outputs=1, loss=lambda y: y.square().sum((-2, -1)) / 2, samples={plan.differentiated}, seed=seed
)
print("gradient at the first layer over that at the last:", (gradients.tokens[0] / gradients.tokens[-1]).sqrt().median().item())
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
