"""Take a plain PyTorch decoder, find out what is wrong with it, shape it in one line, train both and watch. Half a minute on one core.

    python examples/shape_your_own_model.py

Pictures go to out/. Cells begin with `# %%`, so that editors and Jupyter (by jupytext) can run them one by one.
"""

# %% [markdown]
# # Shape your own model
#
# This page takes a deep decoder as one writes it in PyTorch, and goes through the tools in the order in which you would use them:
# diagnose, advise, shape, train, watch.
# The model is small, so that you can repeat everything on a laptop in half a minute.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import shaped

WIDTH, DEPTH, HEADS, VOCABULARY, TOKENS = 48, 24, 4, 32, 24
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#999999"
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "figure.dpi": 150})
out = Path("out")
out.mkdir(exist_ok=True)

# %% [markdown]
# ## A plain decoder
#
# Twenty-four of PyTorch's own layers, with their defaults (Post-LN), a causal mask, an embedding and a head.


# %%
class PlainStack(nn.TransformerEncoder):
    def __init__(self):
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        super().__init__(layer, DEPTH, enable_nested_tensor=False)

    def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
        return super().forward(src, nn.Transformer.generate_square_subsequent_mask(src.shape[1]), is_causal=True)


class Decoder(nn.Module):
    def __init__(self, stack):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.stack, self.head = stack, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.stack((self.tokens(ids) + self.places.weight) / 2**0.5))


torch.manual_seed(0)
plain = Decoder(PlainStack())

# %% [markdown]
# ## A task
#
# The next token depends on the last one, and on the one before that modulo 4.
# A model that knows only how frequent tokens are has a loss of about 3.4, the best possible one has 1.5.

# %%
table = torch.softmax(3.0 * torch.randn(4, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5)), -1)


def draw_batch(generator, rows=8):
    ids = torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=generator)
    for place in range(2, TOKENS + 1):
        ids[:, place] = torch.multinomial(table[ids[:, place - 2] % 4, ids[:, place - 1]], 1, generator=generator)[:, 0]
    return ids


ids = draw_batch(torch.Generator().manual_seed(0))
print(f"the best possible loss: {-(table * table.log()).sum(-1).mean():.2f}")

# %% [markdown]
# ## Diagnose it
#
# One forward and one backward pass, before any training.

# %%
found = shaped.diagnose(plain, (ids[:, :-1],), seeds=0)
print(found)
print(found.verdicts)

# %% [markdown]
# The tokens are parallel behind the last layer: whatever was said, the head sees the same vector.
# A model in this state can learn how frequent tokens are, and little else.
#
# ## Ask for gamma
#
# A shaped Transformer weighs each branch by γ and its shortcut by $\sqrt{1-\gamma^2}$.
# How large may γ be at this width and depth, at the usual temperature of attention, $\tau_0 = n^{-1/2}$?

# %%
tau0 = WIDTH**-0.5
advice = shaped.advise(n=WIDTH, d=DEPTH, m=TOKENS, heads=HEADS, tau0=tau0, share=0.1, seed=0)
print(*advice.sentence.split(". "), sep=".\n")
assert advice.best is not None
gamma = advice.best.gamma

# %% [markdown]
# ## Shape it
#
# One line: another stack in the same decoder, without any norm.

# %%
torch.manual_seed(0)
model = Decoder(shaped.nn.ShapedDecoder(DEPTH, WIDTH, HEADS, gamma=gamma, tau0=tau0))
again = shaped.diagnose(model, (ids[:, :-1],), seeds=0)
print(again)

figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.6), layout="constrained")
for name, diagnosis, colour in (("Post-LN", found, VERMILION), ("shaped", again, BLUE)):
    axes[0].plot([row["correlation"] for row in diagnosis.layers], color=colour, label=name)
    axes[1].semilogy([sum(g**2 for g in row["gradients"].values()) ** 0.5 for row in diagnosis.layers], color=colour)
axes[0].set(xlabel="layer", ylabel="correlation of tokens", ylim=(-0.05, 1.05))
axes[1].set(xlabel="layer", ylabel="norm of the gradient")
axes[0].legend()
figure.savefig(out / "correlations-and-gradients-of-both-models-before-training.png")

# %% [markdown]
# Correlations stay where they were.
# Gradients of the shaped model are large, and larger in its first layers: γ is at its limit, which we shall meet again.
#
# ## Train, and watch
#
# The same optimiser and the same batches for all.
# `shaped.watch` measures every layer of the training step itself, every ten steps, and raises an alarm before a run dies.
# With `stop=True` the loop ends at the first one.


# %%
def train(model, steps=60):
    optimizer, generator, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.Generator().manual_seed(1), []
    with shaped.watch(model, every=10, stop=True) as watcher:
        for _ in range(steps):
            ids = draw_batch(generator)
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            for alarm in watcher.step(loss):
                print(alarm)
            if watcher.stopped:
                break
    return losses, watcher.rows


curves = {"Post-LN": train(plain), "shaped": train(model)}

# %% [markdown]
# The shaped model is stopped after a few steps.
# γ was the largest that is safe at initialisation, and training makes the logits grow from there.
# The alarm says what to try, and QK-norm is one argument.

# %%
torch.manual_seed(0)
better = Decoder(shaped.nn.ShapedDecoder(DEPTH, WIDTH, HEADS, gamma=gamma, tau0=tau0, qk_norm=True))
curves["shaped, QK-norm"] = train(better)
for name, (losses, rows) in curves.items():
    last = list(rows[-1].quantities["correlation"].values())[-1]
    print(
        f"{name}: {len(losses)} steps, loss {losses[0]:.1f} to {sum(losses[-10:]) / 10:.1f}, correlation behind the last layer {last:.2f}"
    )

# %%
figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.6), layout="constrained")
for (name, (losses, rows)), colour in zip(curves.items(), (VERMILION, GREY, BLUE), strict=True):
    axes[0].plot(range(9, len(losses)), torch.tensor(losses).unfold(0, 10, 1).mean(1), color=colour, label=name)
    axes[1].plot([row.step for row in rows], [list(row.quantities["correlation"].values())[-1] for row in rows], "o-", color=colour)
axes[0].axhline(3.4, color=GREY, linestyle=":", linewidth=1)
axes[0].set(xlabel="step", ylabel="loss, mean of ten steps", ylim=(2.8, 4.2))
axes[1].set(xlabel="step", ylabel="correlation at the end", ylim=(-0.05, 1.05))
axes[0].legend(fontsize=7)
figure.savefig(out / "loss-and-correlation-while-the-models-train.png")

# %% [markdown]
# The plain model learns how frequent tokens are, the dotted line, and nothing else: its tokens stay parallel.
# The shaped model with QK-norm begins to learn at once.
#
# ## What this shows, and what not
#
# - It shows what a collapse at initialisation does, and that a diagnosis of one pass foretells it.
# - Pre-LN, the usual way out, trains here too, with two norms a layer.
#   [The race](../race.md) compares tuned models of a real size.
# - γ from `advise` is an upper bound, for initialisation.
#   Without QK-norm this model trains with γ = 0.2.
#
# For your own model: [shaped attention in PyTorch](../modules.md), [in Hugging Face](../huggingface.md),
# [training on your own text](../training.md).
