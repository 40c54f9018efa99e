"""Every layer with a law, for the tests of finite networks."""

import torch

import shaped

BIAS = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, float("-inf")], [0.3, -0.2, 0.1]], dtype=torch.float64)

SHAPED = {
    "attention": shaped.ShapedAttention(0.8, 0.4),
    "causal": shaped.ShapedAttention(0.8, 0.4, mask="causal"),
    "biased": shaped.ShapedAttention(0.8, 0.4, mask=BIAS),
    "heads": shaped.ShapedAttention(0.8, 0.4, heads=4),
    "heads, projected": shaped.ShapedAttention(0.8, 0.4, heads=2, project=True),
    "heads, ALiBi": shaped.ShapedAttention(0.8, 0.4, heads=4, mask=shaped.alibi(3, 4)),
    "QK-norm": shaped.ShapedAttention(0.8, 0.4, qk_norm=True),
    "RoPE": shaped.ShapedAttention(0.8, 0.4, rope=100.0),
    "RoPE, QK-norm, causal": shaped.ShapedAttention(0.8, 0.4, mask="causal", qk_norm=True, rope=100.0),
    "feed-forward": shaped.ShapedFeedForward(0.8, 4.0, -4.0),
    "perceptron": shaped.ShapedPerceptron(1.2, -1.2),
    "transformer": shaped.ShapedAttention(0.7, 0.5) >> shaped.ShapedFeedForward(0.7, 1.0, -1.0),
}
OTHERS = {
    "only id": shaped.ShapedAttention(0.7, centre=False, temperature=False),
    "id and centre": shaped.ShapedAttention(0.7, temperature=False),
    "id and temperature": shaped.ShapedAttention(0.7, centre=False),
    "temperature and centre": shaped.ShapedAttention(0.7, identity=False),
    "softmax attention": shaped.ShapedAttention(0.7).unshaped,
    "softmax attention, heads": shaped.ShapedAttention(0.7, heads=2, project=True, mask="causal").unshaped,
    "lam and gamma free": shaped.ShapedAttention(0.9, lam=0.8),
    "ReLU": shaped.ReLUFeedForward(0.7),
    "ReLU, lam and gamma free": shaped.ReLUFeedForward(1.0, 0.1, lam=1.0),
    "Pre-LN": shaped.PreLN(shaped.ShapedAttention(1.0, lam=1.0).unshaped),
    "Pre-LN, ReLU": shaped.PreLN(shaped.ReLUFeedForward(1.0, lam=1.0)),
    "Post-LN": shaped.PostLN(shaped.ShapedAttention(1.0, lam=1.0, heads=2).unshaped),
    "Post-LN, ReLU": shaped.PostLN(shaped.ReLUFeedForward(1.0, lam=1.0)),
}
EVERY = SHAPED | OTHERS
