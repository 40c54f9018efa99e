"""The theory of the shaped Transformer in ten minutes, with a picture for each idea. It takes ten seconds on one core.

    python examples/theory_in_ten_minutes.py

Pictures go to out/. Cells begin with `# %%`, so that editors and Jupyter (by jupytext) can run them one by one.
"""

# %% [markdown]
# # Theory in ten minutes
#
# What happens to the tokens of a Transformer on their way through many layers?
# At initialisation this question has an exact answer, and it needs no training and no weights.
# This page goes through the whole theory in seven pictures and numbers, with a few lines of code for each.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import shaped

BLUE, VERMILION, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999"  # Okabe and Ito
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "figure.dpi": 150})
out = Path("out")
out.mkdir(exist_ok=True)

# %% [markdown]
# ## 1. One matrix describes the tokens
#
# Take m tokens of width n as the rows of a matrix X.
# Their lengths and angles are in the covariance $V = X X^\top/n$, a matrix of m × m.
# Its normalised entries are the correlations of the tokens: 0 for tokens at right angles, 1 for parallel ones.
# Here are four tokens of length 1, each pair with correlation 0.2.

# %%
V0 = shaped.equicorrelated(m=4, rho=0.2)
print(V0)

# %% [markdown]
# ## 2. Rank collapse
#
# Attention averages tokens, and means are more alike than what they are the means of.
# After many layers all tokens point in one direction: their correlation is 1, and the output no longer depends on what was said.
# LayerNorm does not prevent it.
# Shaped attention does: it replaces softmax by $A = I + \text{softmax}(Y/\tau) - 11^\top/m$, with $\tau = \tau_0\sqrt{n\,n_k}$.
#
# `propagate` draws networks with exactly the right law, and without drawing their weights, so a thousand of them are cheap.

# %%
gamma = 8**-0.5
shaped_block = shaped.ShapedAttention(gamma) >> shaped.ShapedFeedForward(gamma, c_plus=0.0, c_minus=-1.0)
softmax = shaped.ShapedAttention(gamma).unshaped
relu = shaped.ReLUFeedForward(gamma)
blocks = {
    "softmax and ReLU": (softmax >> relu, VERMILION),
    "Pre-LN": (shaped.PreLN(softmax) >> shaped.PreLN(relu), GREEN),
    "Post-LN": (shaped.PostLN(softmax) >> shaped.PostLN(relu), PURPLE),
    "shaped": (shaped_block, BLUE),
}
figure, axes = plt.subplots(figsize=(6.4, 3), layout="constrained")
for name, (block, colour) in blocks.items():
    networks = shaped.propagate(block, V0, n=128, d=96, samples=200, seed=0, record=4)
    rho = networks.rho[:, :, 0, 1]
    low, middle, high = np.quantile(rho.numpy(), [0.1, 0.5, 0.9], axis=1)
    axes.plot(128 * networks.t, middle, color=colour, label=name)
    axes.fill_between(128 * networks.t, low, high, color=colour, alpha=0.15, linewidth=0)
    print(f"{name}: median correlation {middle[-1]:.3f} after 96 blocks")
axes.set(xlabel="block", ylabel="correlation of two tokens", ylim=(-0.8, 1.05))
axes.legend(loc="lower left", ncols=2)
figure.savefig(out / "rank-collapse-and-none-in-the-shaped-network.png")

# %% [markdown]
# The bands hold 80 % of the networks.
# Three of the four lose their tokens.
# In the shaped one the correlation does not go to 1; it becomes random, which brings us to the next point.
#
# ## 3. The limit is a stochastic differential equation
#
# A shaped layer changes V by a mean of order 1/n and a noise of order $1/\sqrt{n}$.
# So after d layers everything depends on $t = d/n$ alone, and as n grows V follows
#
# $$dV = b(V)\,dt + \Sigma(V)^{1/2}\,dB.$$
#
# A layer knows both terms.
# Two layers in a row add up.

# %%
attention, feedforward = shaped_block.layers
print(shaped_block.drift(V0)[0])
print(attention.drift(V0)[0] + feedforward.drift(V0)[0])
print("Sigma is", "x".join(map(str, shaped_block.Sigma(V0).shape)), "for the ten entries of V")

# %% [markdown]
# Is that true?
# We solve the equation to t = 0.75, and compare with networks of three widths whose depth is three quarters of it.

# %%
limit = shaped.solve(shaped_block, V0, T=0.75, samples=4000, seed=0, upper=1e4)
finite = {n: shaped.propagate(shaped_block, V0, n=n, d=3 * n // 4, samples=4000, seed=n, upper=1e4, record="last") for n in (4, 16, 64)}

bins = np.linspace(-1, 1, 21)
figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.8), layout="constrained")
for n, colour in ((4, GREY), (16, VERMILION), (64, BLUE)):
    axes[0].hist(finite[n].rho[-1, :, 0, 1], bins, density=True, histtype="step", color=colour, label=f"network, n = {n}")
axes[0].hist(limit.rho[-1, :, 0, 1], bins, density=True, color=BLUE, alpha=0.2, label="SDE")
axes[0].set(xlabel="correlation at t = 0.75", ylabel="density")
axes[0].legend(fontsize=7, loc="upper left")
axes[1].plot(limit.t, limit.rho[:, :12, 0, 1], color=BLUE, linewidth=0.7, alpha=0.7)
axes[1].set(xlabel="t = depth/width", ylabel="correlation", title="twelve paths of the SDE")
figure.savefig(out / "networks-of-three-widths-against-the-SDE.png")
print(shaped.compare(limit, finite[64], statistics=("rho",)))

# %% [markdown]
# At width 64 four thousand samples cannot tell network and equation apart.
# Even at width 4, with three layers, one has to look twice.
#
# ## 4. Explosions, and QK-norm
#
# The attention part of the drift is cubic in V.
# An equation with a cubic drift can become infinite in finite time, and some paths of this one do.
# With QK-norm the logits see correlations in place of covariances, which are bounded: no path explodes.

# %%
figure, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
for gamma, qk_norm, colour in ((0.3, False, BLUE), (0.5, False, VERMILION), (0.7, False, GREEN), (0.7, True, PURPLE)):
    layer, count = shaped.ShapedAttention(gamma, tau0=0.5, qk_norm=qk_norm), 500
    paths = shaped.solve(layer, V0, T=1.0, samples=count, seed=0, upper=1e6, record="last")
    times = np.sort(paths.stopped[paths.stopped.isfinite()].numpy())
    name = rf"$\gamma$ = {gamma}" + (", QK-norm" if qk_norm else "")
    axes.step([0, *times, 1], np.append(np.arange(len(times) + 1), len(times)) / count, where="post", color=colour, label=name)
    low, high = paths.stopped_interval
    print(f"gamma {gamma}, QK-norm {qk_norm}: {paths.stopped_share:.1%} explode ({low:.1%} to {high:.1%})")
axes.set(xlabel="t = depth/width", ylabel="share of paths that exploded")
axes.legend()
figure.savefig(out / "explosions-over-depth-with-and-without-QK-norm.png")

# %% [markdown]
# So a shaped Transformer has a largest safe γ for its depth and width; [`shaped.advise`](../advise.md) finds it.
#
# ## 5. From the equation to a module
#
# The same layer gives an `nn.Module` with explicit weights, which you can train.
# At initialisation it has the law of `propagate`: here are 300 stacks of 12 layers, made of PyTorch modules, against that law.

# %%
layer, n, d = shaped.ShapedAttention(gamma=0.7, tau0=0.5), 32, 12
generator = torch.Generator().manual_seed(0)
frame, _ = torch.linalg.qr(torch.randn(n, 4, generator=generator, dtype=torch.float64))
X = n**0.5 * torch.linalg.cholesky(V0) @ frame.T  # tokens with covariance V0, exactly

found = []
with torch.no_grad():
    for _ in range(300):
        network = torch.nn.Sequential(*(layer.module(n, generator=generator, dtype=torch.float64) for _ in range(d)))
        found.append(shaped.correlation(shaped.gram(network(X)))[0, 1])
modules = torch.stack(found)
law = shaped.propagate(layer, V0, n=n, d=d, samples=20_000, seed=0, record="last").rho[-1, :, 0, 1]
for name, rho in (("modules", modules), ("propagate", law)):
    print(f"{name}: mean {rho.mean():.3f} ± {rho.std() / len(rho) ** 0.5:.3f}, spread {rho.std():.3f}")

# %% [markdown]
# ## 6. Gradients
#
# Tokens that collapse take the gradients of queries and keys with them.
# `backpropagate` draws the squared norms of the gradients, again exactly in law and without weights.


# %%
def loss(outputs):
    return outputs.square().sum((-2, -1)) / 2


figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.8), layout="constrained", sharex=True)
for name in ("softmax and ReLU", "Pre-LN", "shaped"):
    block, colour = blocks[name]
    gradients = shaped.backpropagate(block, V0, n=64, d=48, outputs=10, loss=loss, samples=100, seed=0)
    for axis, values in ((axes[0], gradients.tokens[:-1]), (axes[1], gradients.weights["query"])):
        axis.semilogy(range(48), values.median(1).values.sqrt(), color=colour, label=name)
    ratio = (gradients.weights["query"][-1] / gradients.weights["query"][0]).median().sqrt()
    print(f"{name}: the query's gradient changes by a factor of {ratio:.2g} from the first block to the last")
axes[0].set(xlabel="block", ylabel="norm of the gradient", title="of the tokens", ylim=(1, 100))
axes[1].set(xlabel="block", title="of the query matrix")
axes[1].legend(fontsize=7)
figure.savefig(out / "gradients-by-layer.png")

# %% [markdown]
# ## 7. What to take with you
#
# - A deep Transformer is a random dynamical system of a small matrix, the covariance of its tokens.
# - Softmax attention drives it to rank one. Shaped attention makes it a diffusion whose clock is depth over width.
# - Depth over width says how random a network is at initialisation, γ and τ0 how fast that grows, and QK-norm keeps it finite.
#
# Read on: [the tutorial for theorists](../tutorials/theorists.md), [how the solver steps](../method.md),
# [networks without their weights](../finite.md), [the law of the gradients](../gradients.md),
# and [every claim of the paper, checked](../figures.md).
