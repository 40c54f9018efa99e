"""Wrong input: a ValueError that names the argument and what it got."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import shaped
from refusals import refused
from shaped.checks import check_bool, in_range, positive, quote, whole_number
from shaped.nn.functional import shaped_attention
from shaped.workers import LocalWorkers

EYE = torch.eye(3, dtype=torch.float64)
LAYER: shaped.Layer = shaped.ShapedPerceptron()


def solve(V0: Any = EYE, layer: shaped.Layer = LAYER, **changes):
    return shaped.solve(layer, V0, **({"T": 0.1, "steps": 2, "samples": 2, "seed": 0} | changes))


def propagate(V0: torch.Tensor = EYE, layer: shaped.Layer = LAYER, **changes):
    usual: dict[str, Any] = {"n": 8, "d": 2, "samples": 2, "seed": 0}
    return shaped.propagate(layer, V0, **(usual | changes))


NORMALISED = shaped.PreLN(shaped.ShapedAttention(0.5))
PATHS = propagate(samples=4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: propagate(n=2), ["n must", "3, the rank of V0", "got 2"]),
        (lambda: propagate(torch.block_diag(torch.ones(3, 3), 1e-9 * torch.ones(2, 2)), n=1), ["n must", "2, the rank of V0", "got 1"]),
        (lambda: propagate(torch.ones(3, 3), n=2, path="gram"), ["path", "3 tokens of n = 2 features", "gram"]),
        (lambda: propagate(torch.full((3, 3), math.nan), n=2), ["V0", "nan"]),
        (lambda: propagate(n=0), ["n must", "0"]),
        (lambda: propagate(d=0), ["d must", "0"]),
        (lambda: propagate(n_k=0), ["n_k", "0"]),
        (lambda: propagate(samples=0), ["samples", "0"]),
        (lambda: propagate(torch.ones(2, 3)), ["V0", "square", "(2, 3)"]),
        (lambda: propagate(torch.tensor(1.0)), ["V0", "square", "()"]),
        (lambda: propagate(layer=shaped.ShapedAttention(0.5, heads=3)), ["heads", "8", "3"]),
        (lambda: shaped.ShapedAttention(0.5, heads=3).module(8), ["heads", "8", "3"]),
        (lambda: propagate(path="weights"), ["path", "gram", "weights"]),
        (lambda: propagate(layer=NORMALISED, path="gram"), ["path", "tokens", "PreLN"]),
        (lambda: shaped.PreLN(LAYER), ["layer", "ShapedPerceptron"]),  # pyright: ignore[reportArgumentType] (wrong on purpose)
        (lambda: shaped.ShapedAttention(0.5, lam=1.5), ["lam", "1.5"]),
        (lambda: shaped.ReLUFeedForward(0.5, math.nan), ["negative_slope", "nan"]),
        (lambda: shaped.compare(PATHS, propagate(torch.eye(2, dtype=torch.float64))), ["other", "3", "2"]),
        (lambda: shaped.compare(PATHS, PATHS, statistics=["trace"]), ["statistics", "trace"]),
        (lambda: shaped.compare(PATHS, PATHS, statistics={"one": 1}), ["statistics", "functions", "1", "one"]),  # pyright: ignore[reportArgumentType] (wrong on purpose)
        (lambda: shaped.compare(PATHS, PATHS, statistics={"sum": lambda V: V.sum()}), ["statistics", "4 paths", "[]", "sum"]),
        (lambda: shaped.compare(PATHS, PATHS, pair=(0, 3)), ["pair", "3"]),
        (lambda: propagate(n=10**400), ["n must", str(2**53), "1329 bits"]),
        (lambda: propagate(executor="processes"), ["executor", "submit", "str"]),
        (lambda: shaped.compare(PATHS, PATHS, resamples=1), ["resamples", "1"]),
        (lambda: LocalWorkers(0), ["workers", "0"]),
        (lambda: solve(1e60 * EYE, dtype=torch.float32), ["V0", "float32", "1e+60"]),
        (lambda: solve(EYE.to(torch.complex128)), ["V0", "real"]),
        (lambda: solve(EYE.expand(0, 3, 3), samples=None), ["V0", "(0, 3, 3)"]),
        (lambda: solve(T=1e12, steps=None), ["steps", "1000000000"]),
        (lambda: solve(device="meta"), ["device", "meta"]),
        (lambda: LAYER.drift(EYE.long()), ["V must", "int64"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.ones(2, 2).long()), ["mask", "int64"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.zeros(1, 1)).module(8)(torch.zeros(3, 8)), ["mask", "3 x 3", "1 x 1"]),
        (lambda: shaped.ShapedAttention(0.5).module(8, n_k=0), ["n_k", "0"]),
        (lambda: LAYER.module(0), ["n must", "0"]),
        (lambda: shaped.ShapedAttention(0.5, tau0=1e200), ["tau0", "1e+200"]),
        (lambda: shaped.ShapedPerceptron(-4.0, -4.0).module(16)(torch.zeros(2, 16)), ["negative_slope", "0.0"]),
        (lambda: solve(torch.ones(2, 3)), ["V0", "square", "(2, 3)"]),
        (lambda: solve(torch.ones(2, 2, 3, 3)), ["V0", "(2, 2, 3, 3)"]),
        (lambda: solve(torch.tensor([[1.0, 0.5], [0.1, 1.0]])), ["V0", "symmetric", "0.4"]),
        (lambda: solve(torch.tensor([[1.0, 2.0], [2.0, 1.0]])), ["V0", "positive semi-definite", "-1"]),
        (lambda: solve(torch.tensor([[1.0, math.nan], [math.nan, 1.0]])), ["V0", "finite", "nan"]),
        (lambda: solve(EYE.expand(5, 3, 3)), ["samples", "5", "2"]),
        (lambda: shaped.equicorrelated(4, -0.5), ["rho", "-0.3333", "-0.5"]),
        (lambda: shaped.equicorrelated(4, 1.1), ["rho", "1.1"]),
        (lambda: shaped.equicorrelated(0, 0.1), ["m", "0"]),
        (lambda: shaped.equicorrelated(2, 0.1, variance=-1.0), ["variance", "-1"]),
        (lambda: shaped.ShapedAttention(1.5), ["gamma", "1.5"]),
        (lambda: shaped.ShapedFeedForward(-0.1), ["gamma", "-0.1"]),
        (lambda: shaped.ShapedFeedForward(0.5, c_plus=math.nan), ["c_plus", "nan"]),
        (lambda: shaped.ShapedPerceptron(c_minus=math.inf), ["c_minus", "inf"]),
        (lambda: shaped.ShapedAttention(0.5, 0.0), ["tau0", "0.0"]),
        (lambda: shaped.ShapedAttention(0.5, heads=0), ["heads", "0"]),
        (lambda: shaped.ShapedAttention(0.5, mask="diagonal"), ["mask", "diagonal"]),
        (lambda: shaped.ShapedAttention(0.5, heads=2, mask=torch.zeros(3, 4, 4)), ["mask", "2 heads", "(3, 4, 4)"]),
        (lambda: shaped.ShapedFeedForward(0.5, c_minus=-1e60), ["c_minus", "-1e+60"]),
        (lambda: shaped.alibi(0, 8), ["m must", "0"]),
        (lambda: shaped.gram(torch.ones(3)), ["X must", "(3,)"]),
        (lambda: shaped.gram(torch.ones(2, 3).long()), ["X must", "int64"]),
        (lambda: shaped.correlation(torch.ones(3)), ["V must", "(3,)"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.ones(2, 3)), ["mask", "(2, 3)"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]])), ["mask", "row 1"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.eye(2).bool() & torch.tensor([True, False])), ["mask", "row 1"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.tensor([[math.inf]])), ["mask", "inf"]),
        (lambda: solve(layer=shaped.ShapedAttention(0.5, mask=torch.zeros(2, 2))), ["mask", "3 x 3", "2 x 2"]),
        (lambda: solve(steps=0), ["steps", "0"]),
        (lambda: solve(samples=0), ["samples", "0"]),
        (lambda: solve(T=-1.0), ["T", "-1.0"]),
        (lambda: solve(T=math.nan), ["T", "nan"]),
        (lambda: solve(seed=-1), ["seed", "-1"]),
        (lambda: solve(chunk=0), ["chunk", "0"]),
        (lambda: solve(record="some"), ["record", "some"]),
        (lambda: solve(record=0), ["record", "0"]),
        (lambda: solve(method="heun"), ["method", "cone", "heun"]),
        (lambda: solve(device="abacus"), ["device", "abacus"]),
        (lambda: solve(dtype=torch.float16), ["dtype", "float16"]),
        (lambda: solve(upper=-1.0), ["upper", "-1.0"]),
        (lambda: solve(lower=math.inf), ["lower", "inf"]),
        (lambda: solve(upper=True), ["upper must be a number", "True"]),
        (lambda: solve(T=True), ["T must be a number", "True"]),
        (lambda: in_range("gamma", np.True_, 0.0, 1.0), ["gamma must be a number", "True"]),  # as layers do
        (lambda: positive("tau0", torch.tensor(True)), ["tau0 must be a number", "True"]),
        (lambda: shaped.equicorrelated(3, True), ["rho must be a number", "True"]),
        (lambda: solve(upper=0.5, lower=2.0), ["upper must", "larger than lower, 2", "0.5"]),
        (lambda: propagate(upper=2.0, lower=2.0), ["upper must", "larger than lower, 2", "got 2"]),
        (lambda: propagate(upper=0.0), ["upper must", "larger than 0", "got 0"]),
        (lambda: solve(samples=10**9, record=1, V0=torch.eye(300, dtype=torch.float64)), ["samples", "record", "GiB"]),
        (lambda: LAYER.drift(torch.ones(2, 3, 3, 2)), ["V", "(2, 3, 3, 2)"]),
        (lambda: shaped.Chain(), ["layers"]),
        (lambda: shaped.ShapedAttention(0.5, mask=torch.zeros(0, 0)), ["mask", "(0, 0)"]),
        (lambda: solve([[1.0, 0.0], [0.0]]), ["V0", "[[1.0, 0.0], [0.0]]"]),
        (lambda: solve(None), ["V0", "None"]),
        (lambda: shaped.equicorrelated(3, 0.2, dtype=torch.int64), ["dtype", "int64"]),
        (lambda: shaped.equicorrelated(3, 0.2, device="abacus"), ["device", "abacus"]),
    ],
)
def test_wrong_input_is_named(call, words):
    with refused(*words):
        call()


WITHOUT_TYPE_CHECKS = """
import torch, shaped
layer, V0 = shaped.ShapedPerceptron(), torch.eye(3, dtype=torch.float64)
usual = dict(T=0.1, steps=2, samples=2, seed=0)
sizes = dict(n=8, d=2, samples=2, seed=0)
paths = shaped.propagate(layer, V0, **sizes | dict(samples=4))
calls = {
    **{key: (lambda x, key=key: shaped.solve(layer, V0, **usual | {key: x})) for key in ("steps", "samples", "seed", "chunk", "record")},
    **{key: (lambda x, key=key: shaped.propagate(layer, V0, **sizes | {key: x})) for key in ("n", "d", "n_k")},
    "heads": lambda x: shaped.ShapedAttention(0.5, heads=x),
    "m": lambda x: shaped.equicorrelated(x, 0.1),
    "resamples": lambda x: shaped.compare(paths, paths, resamples=x),
    "workers": shaped.workers.LocalWorkers,
    "gamma": lambda x: shaped.ShapedFeedForward(x if x != True else "yes"),
    "upper": lambda x: shaped.solve(layer, V0, upper={2.5: "2.5", True: "yes"}.get(x, x), **usual),
    "rho": lambda x: shaped.equicorrelated(3, {2.5: "0.5", True: None}.get(x, x)),
    "at": lambda x: shaped.compare(paths, paths, at={True: 99, -1: None}.get(x, x)),
    "pair": lambda x: shaped.compare(paths, paths, pair=(0, x) if x in (2.5, "two") else x),
    "layer": lambda x: shaped.solve([layer, x], V0, **usual),
    "generator": lambda x: layer.noise(V0, x),
    "other": lambda x: shaped.compare(paths, x),
}
for name, call in calls.items():
    for value in (2.5, True, "two", -1, float("nan")):
        try:
            call(value)
        except ValueError as error:
            if name not in str(error) or "\\n" in str(error):
                print(name, value, "is told", error)
        else:
            print(name, value, "is accepted")
"""


def test_what_should_be_a_whole_number():
    """In a process of its own, without the type checks of the tests, as users have it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TYPE_CHECKS], capture_output=True, text=True, check=True)
    assert done.stdout == ""


WRONG_TYPES = """
import torch, shaped
layer, V0 = shaped.ShapedPerceptron(), torch.eye(3, dtype=torch.float64)
for name, call, value in (
    ("identity", lambda x: shaped.ShapedAttention(0.5, identity=x), 0.5),
    ("centre", lambda x: shaped.ShapedAttention(0.5, centre=x), "no"),
    ("temperature", lambda x: shaped.ShapedAttention(0.5, temperature=x), 0),
    ("project", lambda x: shaped.ShapedAttention(0.5, project=x), 1),
    ("qk_norm", lambda x: shaped.ShapedAttention(0.5, qk_norm=x), 1),
    ("rope", lambda x: shaped.ShapedAttention(0.5, rope=x), "llama"),
    ("X", shaped.gram, "x"),
    ("V", shaped.correlation, None),
    ("dtype", lambda x: shaped.equicorrelated(3, 0.2, dtype=x), None),
    ("check", lambda x: shaped.solve(layer, V0, T=0.1, seed=0, check=x), 1),
    ("n", layer.module, None),
    ("n", lambda x: shaped.ShapedAttention(0.5).module(x), None),
):
    try:
        call(value)
        print(name, "accepts", value)
    except ValueError as error:
        said = str(error)
        if not said.startswith(name + " must") or repr(value).strip("'") not in said or "\\n" in said:
            print(name, value, said)
"""


def test_what_is_only_like_a_boolean_or_a_matrix_is_refused():
    done = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_numbers_of_other_libraries_are_numbers():
    paths = solve(np.eye(3), steps=np.int64(2), samples=np.int64(3), record=np.int64(1))
    assert paths.V.shape == (3, 3, 3, 3)
    assert solve([[1.0, 0.2], [0.2, 1.0]]).V[0, 0, 0, 1] == 0.2
    assert not solve(EYE.clone().requires_grad_()).V.requires_grad


@pytest.mark.parametrize("number", [np.int8, np.uint64, np.array, torch.tensor])
def test_seeds_and_widths_of_other_libraries_are_those_of_python(number: Any):
    """Also in the check of the step, which draws from the seed too: it had ended with an OverflowError."""
    wanted, found = solve(seed=3, check=True), solve(seed=number(3), check=True)
    assert torch.equal(found.V, wanted.V)
    assert found.info == wanted.info
    wanted, found = propagate(n=6, seed=3), propagate(n=number(6), seed=number(3))
    assert torch.equal(found.V, wanted.V)
    assert torch.equal(found.t, wanted.t)  # 1/6 of a tensor is rounded to single precision
    assert (found.info, type(found.info["n"])) == (wanted.info, int)
    given: dict[str, Any] = {"d": 2, "outputs": 1, "loss": lambda outputs: outputs.square().sum((-2, -1)), "samples": 2}
    wanted, found = (
        shaped.backpropagate(LAYER, EYE, n=6, seed=3, **given),
        shaped.backpropagate(LAYER, EYE, n=number(6), seed=number(3), **given),
    )
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.t, wanted.t)
    assert (found.info, type(found.info["n"])) == (wanted.info, int)


OTHER_NUMBERS = """
import numpy as np, torch, shaped
from shaped.layers.base import Sizes
gamma = torch.nn.Parameter(torch.tensor(0.5))
attention = shaped.ShapedAttention(gamma, np.float32(1.0), np.int8(16), project=np.True_)
feedforward = shaped.ShapedFeedForward(gamma, np.float16(0.0), torch.tensor(-1))
sizes = Sizes(np.uint8(200), np.int8(100))
print([attention.gamma, attention.tau0, attention.heads, attention.project, attention.terms[1].variance, sizes.n, sizes.n_k])
print([feedforward.gamma, feedforward.c_plus, feedforward.c_minus])
"""


def test_layers_keep_numbers_of_other_libraries_as_python_s():
    """numpy's small integers overflow (16² is 0 in int8, so the limit of 16 heads had infinite noise), and a Parameter brings its graph.

    In a process of its own, because the tests check the types of arguments.
    """
    done = subprocess.run([sys.executable, "-W", "error", "-c", OTHER_NUMBERS], capture_output=True, text=True, check=True)
    assert done.stdout == f"[0.5, 1.0, 16, True, {0.5**4 / 16}, 200, 100]\n[0.5, 0.0, -1.0]\n"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        subprocess.run([sys.executable, "-c", "import shaped; shaped.ShapedAttention(None)"], capture_output=True, text=True, check=True)
    assert "gamma must be a number, got None" in caught.value.stderr


def test_messages_stay_on_one_line_whatever_the_mask():
    layer = shaped.ShapedAttention(0.5, centre=False, mask=torch.zeros(9, 9))
    with pytest.raises(shaped.NoLimit) as caught:
        layer.limit()
    assert "\n" not in str(caught.value)
    assert "ShapedAttention(gamma=0.5, mask=<9 x 9 bias>, centre=False)" in str(caught.value)


@pytest.mark.parametrize("wrong", [np.ones((40, 40)), torch.ones(40, 40)])
def test_an_array_in_the_wrong_place_is_one_line(wrong: Any):
    calls: dict[str, Any] = {
        "gamma must be a number": lambda: in_range("gamma", wrong, 0.0, 1.0),
        "heads must be a whole number": lambda: whole_number("heads", wrong),
        "qk_norm must be True or False": lambda: check_bool("qk_norm", wrong),
        "T must": lambda: solve(T=wrong),
        "record must": lambda: solve(record=wrong),
        "layer must": lambda: solve(layer=wrong),
        "seed must": lambda: propagate(seed=wrong),
    }
    for words, call in calls.items():
        with refused(words, f"got {type(wrong).__name__} of shape [40, 40]"):
            call()


def test_what_an_error_got_is_one_line():
    assert [quote(value) for value in (1.5, "a\nb", np.arange(3), torch.tensor(2.0))] == [
        "1.5",
        r"'a\nb'",
        "array([0, 1, 2])",
        "tensor(2.)",
    ]
    assert quote(torch.nn.Sequential(torch.nn.Identity())) == "Sequential( (0): Identity() )"
    assert quote("a" * 300) == "'" + "a" * 198 + "…"
    with refused("layer must be a layer", "got Sequential( (0): Identity() )"):
        solve(layer=torch.nn.Sequential(torch.nn.Identity()))  # pyright: ignore[reportArgumentType] (wrong on purpose)
    with refused("q must be a tensor, got ndarray of shape [1, 2, 40, 8]"):
        shaped_attention(np.ones((1, 2, 40, 8)), torch.ones(1, 2, 40, 8), torch.ones(1, 2, 40, 8))  # pyright: ignore[reportArgumentType]


def test_arrays_and_lists_are_matrices_too():
    V = np.array([[1.0, 0.5, 0.2], [0.5, 1.0, 0.3], [0.2, 0.3, 2.0]])
    backwards, right = V[::-1, ::-1], torch.from_numpy(V[::-1, ::-1].copy())
    fixed = np.broadcast_to(np.eye(3), (2, 3, 3))  # not to be written to
    for given in (backwards, backwards.tolist(), backwards.astype(np.longdouble)):
        assert torch.equal(solve(given).V, solve(right).V)
    assert torch.equal(solve(fixed).V, solve(EYE).V)
    assert torch.equal(solve(np.eye(3, dtype=int)).V, solve(EYE).V)
    same = subprocess.run([sys.executable, "-c", WITH_ARRAYS], capture_output=True, text=True)  # the tests check types, users may not
    assert (same.stdout, same.stderr) == ("True True True\n", "")
    V0 = right.clone().requires_grad_()
    (shaped.ShapedAttention(0.5) >> shaped.ShapedFeedForward(0.5)).drift(V0).sum().backward()
    assert V0.grad is not None


WITH_ARRAYS = """
import numpy, torch, shaped
layer, V = shaped.ShapedAttention(0.5), numpy.eye(3)[::-1, ::-1]
right, seeded = torch.eye(3, dtype=torch.float64), lambda: torch.Generator().manual_seed(0)
masked = [shaped.ShapedAttention(0.5, mask=mask).drift(right) for mask in ("causal", numpy.tri(3, dtype=bool)[::-1][::-1])]
equal = [layer.drift(V).equal(layer.drift(right)), layer.noise(V, seeded()).equal(layer.noise(right, seeded()))]
print(*equal, torch.allclose(*masked, rtol=0.0, atol=1e-12))  # "causal" takes running means
"""


def test_tokens_of_very_different_lengths_start_as_they_are():
    """Two of them alike: the matrix is singular, and an eigenvalue of -1e-16 is rounding, though a short token's variance is no more."""
    V = shaped.equicorrelated(8, 0.5)
    V[1], V[:, 1], V[0, 1], V[1, 1] = V[0].clone(), V[:, 0].clone(), 1.0, 1.0
    lengths = torch.ones(8, dtype=torch.float64)
    lengths[-2:] = 1e-8
    V = V * lengths * lengths[:, None]
    assert torch.equal(solve(V).V[0, 0], V)


def test_a_bound_beyond_single_precision_is_none():
    assert solve(dtype=torch.float32, upper=1e39).stopped.isinf().all()


@pytest.mark.parametrize("m", [4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_that_are_alike_stay_so(m, dtype):
    V = shaped.equicorrelated(m, 0.2)
    V[1], V[:, 1], V[0, 1], V[1, 1] = V[0].clone(), V[:, 0].clone(), 1.0, 1.0
    how: Any = {"samples": 200, "seed": 0, "dtype": dtype, "record": "last"}
    layer = shaped.ShapedAttention(0.7)
    for paths in (shaped.propagate(layer, V, n=50, d=50, **how), shaped.solve(layer, V, T=1.0, **how)):
        assert (1.0 - paths.rho[-1, :, 0, 1]).abs().max() < 100 * torch.finfo(dtype).eps


def test_a_barely_indefinite_start_is_rounding_and_accepted():
    X = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))  # single precision, rank 2
    paths = solve(X @ X.mT)
    assert torch.linalg.eigvalsh(paths.V[0]).min() > -1e-12
    alike = 1 + 0.01 * torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    assert solve(alike @ alike.mT / 64, samples=1).V.isfinite().all()
