"""Distances between laws, their bands and errors."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, wasserstein_distance

import shaped
from refusals import refused
from shaped.compare import Distance, estimate_tail, find_spread, find_statistic, make_resampler, measure_distances, permute_within
from shaped.testing.stats import seed


def trajectory(V: torch.Tensor, stopped: int = 0) -> shaped.Trajectory:
    times = torch.full((len(V),), math.inf, dtype=torch.float64)
    times[:stopped] = 0.0
    return shaped.Trajectory(torch.tensor([1.0], dtype=torch.float64), V[None], times)


def test_distances_are_scipys():
    rng = np.random.default_rng(seed(80))
    x, y = rng.standard_normal((300, 1)), np.round(1.1 * rng.standard_normal((200, 1)), 1)  # rounded: with ties
    ks, wasserstein = measure_distances(x, y, 20, rng)
    assert ks.value == pytest.approx(ks_2samp(x[:, 0], y[:, 0])[0])
    assert wasserstein.value == pytest.approx(wasserstein_distance(x[:, 0], y[:, 0]))


def test_the_band_holds_95_percent_of_samples_of_one_law():
    rng = np.random.default_rng(seed(81))
    inside = []
    for _ in range(400):
        x, y = rng.standard_normal((100, 2)), rng.standard_normal((150, 2))
        inside.append([distance.within_band for distance in measure_distances(x, y, 100, rng)])
    share, error = np.mean(inside, 0), math.sqrt(0.95 * 0.05 / 400)
    assert (np.abs(share - 0.95) < 5 * error + 0.01).all()  # 0.01: the quantile of 100 permutations


def test_the_band_and_p_say_the_same_for_few_resamples_too():
    """The 95 % quantile of 20 permutations, interpolated, was below the measured one in 9 % of cases."""
    rng, found = np.random.default_rng(seed(94)), []
    for number in range(400):
        x, y = rng.standard_normal((2, 12, 1))
        found += measure_distances(x, np.round(y, 1) if number % 2 else y, 20, rng)
    assert all(distance.within_band == (distance.p > 0.05) for distance in found)
    rejected = np.mean([not distance.within_band for distance in found])
    assert 0.01 < rejected < 0.05 + 5 * math.sqrt(0.05 * 0.95 / 400)


def test_the_error_is_the_scatter_of_fresh_samples():
    """Kolmogorov-Smirnov: of one law, whose scatter is known (variance of the Kolmogorov law), and of distant ones.

    Declared bias: 0.14 for one law. It was 0.22 while the bootstrap added its noise to that of the samples.
    """
    rng, n = np.random.default_rng(seed(95)), 60
    same = [measure_distances(rng.standard_normal((n, 1)), rng.standard_normal((n, 1)), 40, rng)[0] for _ in range(400)]
    errors = np.array([distance.error for distance in same])
    scatter = math.sqrt((math.pi**2 / 12 - math.pi / 2 * math.log(2) ** 2) * 2 / n)
    assert abs(errors.mean() / scatter - 1) < 0.14 + 5 * errors.std() / scatter / math.sqrt(400)
    far = [measure_distances(rng.standard_normal((n, 1)), 2 + rng.standard_normal((n, 1)), 40, rng)[1] for _ in range(100)]
    errors, exact = np.array([distance.error for distance in far]), math.sqrt(2 / n)  # Wasserstein: the difference of the means
    assert abs(errors.mean() / exact - 1) < 0.02 + 5 * errors.std() / exact / math.sqrt(100)


def test_a_heavy_tail_has_no_error():
    """Its sample variance is a small part of its variance. Bands and p are those of permutations, which hold for any law."""
    rng = np.random.default_rng(seed(96))
    normal, heavy = rng.standard_normal((2, 2000, 1)), np.exp(2 * rng.standard_normal((2, 2000, 1)))
    ks, wasserstein = measure_distances(heavy[0], heavy[1], 40, rng)
    assert math.isnan(wasserstein.error)
    assert "± ?, heavy tail (one law: below" in str(wasserstein)
    assert ks.error > 0.0
    assert all("heavy" not in str(distance) for distance in measure_distances(normal[0], normal[1], 40, rng))
    spread_starts = np.repeat(heavy[0], 2, 0)  # V0 with a heavy tail, but not what paths do from there
    values, groups = spread_starts + rng.standard_normal(spread_starts.shape), np.repeat(np.arange(2000), 2)
    assert estimate_tail(find_spread(values, groups))[0] < 0.2 < 0.4 < estimate_tail(find_spread(values, 0 * groups))[0]
    few_and_far = 10.0 + normal[1, :40]  # seen from the median of both samples they would be a tail
    assert "heavy" not in str(measure_distances(np.concatenate(normal), few_and_far, 40, rng)[1])


@pytest.mark.parametrize("k", [0.1, 0.25])
def test_the_tail_of_a_pareto_law(k):
    """Its index, of many values, and the second moment 2/((1 - k)(1 - 2k)), of which small samples lack a part."""
    rng = np.random.default_rng(seed(97))

    def draw(*shape: int) -> np.ndarray:
        return ((1 - rng.random(shape)) ** -k - 1) / k

    index = np.array([estimate_tail(values)[0] for values in draw(20, 40_000)])
    assert abs(index.mean() - k) < 5 * index.std() / math.sqrt(20) + 0.01
    small, exact = draw(400, 100), math.sqrt(2 / ((1 - k) * (1 - 2 * k)))
    plain = np.sqrt((small**2).mean(1)) / exact
    mended = plain * np.array([estimate_tail(values)[1] for values in small])
    assert abs(np.median(mended) - 1) < 0.05 + 5 * 1.25 * mended[np.isfinite(mended)].std() / math.sqrt(400)
    assert abs(np.median(mended) - 1) < abs(np.median(plain) - 1) / 2 + 0.01
    assert estimate_tail(np.append(draw(2000), 1e3))[0] >= 0.5  # one path that exploded
    for few in (np.zeros(50), np.ones(3), 1e200 * np.arange(9.0)):
        assert estimate_tail(few) == (0.25, 1.0)


def test_rows_are_drawn_again_within_their_cells():
    cells, rng = np.array([2, 0, 2, 0, 2, 0, 0]), np.random.default_rng(seed(98))
    resample = make_resampler(cells, rng)
    assert resample is not None
    drawn = np.array([resample() for _ in range(4000)])
    assert np.allclose(drawn[:, cells == 0].sum(1), 0.0)
    assert np.allclose(drawn[:, cells == 2].sum(1), 0.0)
    variance = (drawn**2).mean(0)  # multinomial, (k - 1)/k, times k/(k - 1)
    assert (np.abs(variance - 1) < 5 * (drawn**2).std(0) / math.sqrt(4000)).all()
    assert make_resampler(np.array([0, 0, 1]), rng) is None


def test_the_floor_is_the_root_mean_square_over_permutations():
    """Two samples of one point each are 1 apart however they are permuted. Of the 6 ways to cut 0, 1, 2, 3 into two pairs, 2 have the
    Kolmogorov-Smirnov distance 1 and 4 have 1/2; their Wasserstein distances are 2 and 1."""
    rng = np.random.default_rng(seed(86))
    for distance in measure_distances(np.array([[0.0]]), np.array([[1.0]]), 20, rng):
        assert distance.floor == distance.band == 1.0
    resamples = 2000
    ks, wasserstein = measure_distances(np.array([[0.0], [1.0]]), np.array([[2.0], [3.0]]), resamples, rng)
    for distance, values in ((ks, (1.0, 0.5, 0.5)), (wasserstein, (2.0, 1.0, 1.0))):
        squares = np.array(values) ** 2
        assert abs(distance.floor**2 - squares.mean()) < 5 * squares.std() / math.sqrt(resamples)


def test_five_percent_are_noticed():
    rng = np.random.default_rng(seed(82))
    x, y = rng.standard_normal((40_000, 1)), 1.05 * rng.standard_normal((40_000, 1))
    for distance in measure_distances(x, y, 50, rng):
        assert not distance.within_band
        assert distance.p < 0.05
    exact = 0.05 * math.sqrt(2 / math.pi)  # Wasserstein distance of N(0, 1) and N(0, 1.05²)
    _, wasserstein = measure_distances(x, y, 100, rng)
    assert abs(wasserstein.value - exact) < 5 * wasserstein.error


def test_rows_that_repeat_themselves_count_once():
    """Numbers of one path depend on each other; the band must not shrink because there are more of them."""
    rng = np.random.default_rng(seed(83))
    x, y = rng.standard_normal((500, 1)), rng.standard_normal((500, 1))
    single = measure_distances(x, y, 200, np.random.default_rng(0))
    double = measure_distances(np.repeat(x, 2, 1), np.repeat(y, 2, 1), 200, np.random.default_rng(0))
    for one, two in zip(single, double, strict=True):
        assert one.value == pytest.approx(two.value)
        assert one.band == pytest.approx(two.band)


def test_compare_reads_statistics_by_name_and_by_function():
    V = torch.stack([torch.diag(torch.tensor([1.0, s], dtype=torch.float64)) for s in np.linspace(0.5, 1.5, 50)])
    found = shaped.compare(trajectory(V), trajectory(2 * V, stopped=10), statistics=("rho", "V", "variance", "logdet", "eigmax"))
    assert found.ks["rho"].value == found.ks["V"].value == 0.0
    assert found.ks["variance"].value == 1.0
    assert found.wasserstein["variance"].value == pytest.approx(1.0)
    assert found.stopped == (0.0, 0.2)
    assert "Kolmogorov" in str(found)
    own = shaped.compare(trajectory(V), trajectory(2 * V), statistics={"trace": lambda V: V.diagonal(dim1=-2, dim2=-1).sum(-1)})
    assert own.wasserstein["trace"].value == pytest.approx(2.0)
    pooled = shaped.compare(trajectory(V), trajectory(2 * V), statistics=("variance",), pair=None)
    assert pooled.wasserstein["variance"].value == pytest.approx(1.0)
    of_one = shaped.compare(trajectory(V), trajectory(2 * V), statistics=("V",), pair=(0, 0))
    assert of_one.wasserstein["V"].value == pytest.approx(1.0)


def test_one_token_and_too_few_paths():
    V = torch.rand(30, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert list(shaped.compare(trajectory(V), trajectory(V)).ks) == ["variance"]
    with pytest.raises(ValueError, match="at least 2 paths"):
        shaped.compare(trajectory(V), trajectory(V, stopped=30))


def test_paths_count_until_they_stop():
    """At a time before a path stops it is a path like the others: leaving it out would be to look into the future."""
    layer, V0 = shaped.ShapedAttention(0.8), shaped.equicorrelated(3, 0.2)
    long = shaped.solve(layer, V0, T=0.5, steps=50, samples=4000, seed=seed(84), upper=5.0)
    short = shaped.solve(layer, V0, T=0.05, steps=5, samples=4000, seed=seed(85), upper=5.0)
    assert long.stopped_share > 0.2
    cut = shaped.Trajectory(long.t[:6], long.V[:6], long.stopped)
    assert shaped.compare(cut, short, statistics=("eigmax",)).ks["eigmax"].value < 2.74 * math.sqrt(2 / 4000)


def test_stopped_is_of_the_time_compared():
    paths = shaped.solve(shaped.ShapedAttention(0.8), shaped.equicorrelated(3, 0.2), T=0.5, steps=50, samples=400, seed=seed(84), upper=5.0)
    early = (paths.stopped <= paths.t[5]).double().mean().item()
    assert early < paths.stopped_share
    assert shaped.compare(paths, paths, at=5, statistics="rho").stopped == (pytest.approx(early), pytest.approx(early))


def test_what_differs_by_rounding_is_equal():
    layer, V0 = shaped.ShapedAttention(0.0), shaped.equicorrelated(2, 0.2)
    half = shaped.propagate(layer, V0, n=8, d=50, samples=50, seed=0, dtype=torch.float32)
    found = shaped.compare(shaped.solve(layer, V0, T=6.25, steps=50, samples=50, seed=0), half)
    assert all(distance.value == 0.0 for distance in (*found.ks.values(), *found.wasserstein.values()))


def test_tokens_that_coincide_have_one_law_in_both_dtypes():
    """The determinant is then 0, and what is computed of it is rounding, of another size in each dtype."""
    V0 = torch.ones(3, 3, dtype=torch.float64)
    V0[2, :2] = V0[:2, 2] = 0.3
    block = shaped.ShapedAttention(0.5) >> shaped.ShapedFeedForward(0.5)
    single, double = (
        shaped.propagate(block, V0, n=32, d=16, samples=1000, seed=seed(place), dtype=dtype)
        for place, dtype in ((87, torch.float32), (88, torch.float64))
    )
    found = shaped.compare(double, single)
    assert found.ks["logdet"].value < 2.74 * math.sqrt(2 / 1000)
    assert found.unresolved == {"rho": 1.0, "V": 0.0, "logdet": 1.0, "eigmax": 0.0}
    assert str(found).count("rounding hides the collapse in 100% of the values") == 2


def test_correlations_near_one_have_one_law_in_both_dtypes():
    """A third of these paths come nearer to ±1 than float32 can tell."""
    layer, V0 = shaped.ShapedPerceptron(0.0, -1.0), shaped.equicorrelated(2, 0.2)
    single, double, other = (
        shaped.propagate(layer, V0, n=25, d=d, samples=1500, seed=seed(place), dtype=dtype, record="last")
        for place, d, dtype in ((89, 200, torch.float32), (90, 200, torch.float64), (91, 150, torch.float64))
    )
    found = shaped.compare(double, single)
    assert max(found.ks[name].value for name in ("rho", "logdet")) < 2.74 * math.sqrt(2 / 1500)
    assert 0.2 < found.unresolved["rho"] < 0.5
    late = shaped.Trajectory(single.t, other.V, other.stopped)
    assert not shaped.compare(single, late).ks["rho"].within_band, "what rounding leaves still tells two laws apart"


def test_what_float64_resolves_keeps_its_bits():
    V = torch.stack([shaped.equicorrelated(2, 1.0 - 10.0**-k) for k in range(1, 11)])
    for dtype, resolved in ((torch.float64, 10), (torch.float32, 4)):
        rho, logdet = (find_statistic(name, (0, 1), 2, dtype)(V) for name in ("rho", "logdet"))
        assert (rho[:resolved, 0] == shaped.correlation(V)[:resolved, 0, 1]).all()
        assert (logdet[:resolved] == torch.linalg.eigvalsh(V)[:resolved].log().sum(-1)).all()
        assert (rho[resolved:] == 1.0).all()
        found = shaped.compare(trajectory(V), trajectory(V.to(dtype)), statistics=("rho", "V", "logdet"))
        assert found.unresolved["rho"] == pytest.approx(1 - resolved / 10)
        assert found.unresolved["V"] == 0.0


def spread_out(starts: torch.Tensor, rng: np.random.Generator, shift: float = 0.0, dtype: torch.dtype = torch.float64) -> shaped.Trajectory:
    """A token whose variance is its start, a normal number and the shift. The last three paths stopped before that."""
    ends = starts + shift + torch.from_numpy(rng.standard_normal(len(starts)))
    stopped = torch.full((len(starts),), math.inf, dtype=torch.float64)
    stopped[-3:] = 0.5
    return shaped.Trajectory(
        torch.tensor([0.0, 1.0], dtype=torch.float64), torch.stack([starts, ends])[:, :, None, None].to(dtype), stopped
    )


def measure_starts(different: int, shift: float, rng: np.random.Generator) -> Distance:
    """The Kolmogorov-Smirnov distance of 60 paths and 60 that are shifted, from so many different starts."""
    starts = np.repeat(np.linspace(10.0, 30.0, different), 60 // different)[:, None]
    groups = np.tile(np.repeat(np.arange(different), 60 // different), 2)
    x, y = starts + rng.standard_normal((2, 60, 1))
    return measure_distances(x, y + shift, 40, rng, groups)[0]


@pytest.mark.parametrize("different", [2, 60])
def test_different_starts_do_not_widen_the_band(different):
    """The starts are much further apart than the ends of paths from one start. Each trajectory has them in another order and dtype."""
    rng, found = np.random.default_rng(seed(92)), []
    for _ in range(200):
        starts = torch.linspace(10.0, 30.0, different, dtype=torch.float64).repeat(60 // different)
        pair = spread_out(starts, rng), spread_out(starts.flip(0), rng, dtype=torch.float32)
        distances = shaped.compare(*pair, resamples=40)
        found.append([(d["variance"].p, d["variance"].error, d["variance"].value) for d in (distances.ks, distances.wasserstein)])
    p, error, value = np.moveaxis(np.array(found), -1, 0)
    assert (np.abs(p.mean(0) - 0.5) < 5 * math.sqrt(1 / 12 / 200) + 0.1).all()  # 0.1: equal distances of permutations count, too
    assert ((p <= 0.1).mean(0) < 0.1 + 5 * math.sqrt(0.1 * 0.9 / 200)).all()
    assert (np.abs(np.nanmean(error, 0) / value.std(0) - 1) < 0.3 + 5 / math.sqrt(2 * 200)).all()  # at most 0.3 too large
    starts = torch.linspace(10.0, 30.0, different, dtype=torch.float64).repeat(1200 // different)
    far = np.array([[d.error, d.value] for d in (measure_starts(2, 2.0, rng) for _ in range(100))])
    assert abs(far[:, 0].mean() / far[:, 1].std() - 1) < 5 / math.sqrt(2 * 100), "a permutation mixes laws that are far apart"
    moved = shaped.compare(spread_out(starts, rng), spread_out(starts, rng, shift=0.5))
    assert not moved.wasserstein["variance"].within_band


def test_equal_starts_keep_their_bits_and_unequal_shares_are_not_matched():
    """Nothing is matched where paths have one start, where it was not recorded, and where the starts are different mixtures."""
    rng = np.random.default_rng(seed(93))

    def forget_start(path: shaped.Trajectory) -> shaped.Trajectory:
        return shaped.Trajectory(path.t[1:], path.V[1:], path.stopped)

    same, two = torch.full((60,), 10.0, dtype=torch.float64), torch.tensor([10.0, 30.0], dtype=torch.float64)
    for one, other in ((same, same), (two.repeat(30), two.repeat_interleave(torch.tensor([20, 40]))), (same, two.repeat(30))):
        paths = spread_out(one, rng), spread_out(other, rng)
        assert shaped.compare(*paths) == shaped.compare(*map(forget_start, paths))
    paths = spread_out(two.repeat(30), rng), spread_out(two.repeat(15), rng)
    assert shaped.compare(*paths) != shaped.compare(*map(forget_start, paths))
    late = forget_start(paths[0])  # its first record is no start
    assert shaped.compare(late, late).ks["variance"].band > 0.0


def test_labels_are_permuted_within_groups():
    groups, values = np.array([2, 0, 2, 1, 0, 2]), np.array([10, 20, 11, 30, 21, 12])
    found = [permute_within(groups, values, np.random.default_rng(k)) for k in range(200)]
    assert all((row // 10 == values // 10).all() for row in found)
    assert len({tuple(row) for row in found}) == 6 * 2


def test_trajectories_of_one_seed_are_named():
    """They are alike: two laws that other seeds tell apart would have p = 1 (here gamma 0.5 and 0.53)."""
    V0 = shaped.equicorrelated(2, 0.2)

    def network(seed: int, gamma: float = 0.5, path: str = "gram") -> shaped.Trajectory:
        return shaped.propagate(shaped.ShapedFeedForward(gamma), V0, n=16, d=8, samples=100, seed=seed, path=path)

    found = shaped.compare(network(0), network(0, 0.53), statistics="V", resamples=50)
    assert found.one_seed
    assert "one seed" in str(found)
    assert found.ks["V"].p > 0.99
    limit = shaped.solve(shaped.ShapedFeedForward(0.5), V0, T=0.5, samples=100, seed=0)
    for other in (network(1), network(0, path="tokens"), limit):
        apart = shaped.compare(network(0), other, statistics="V", resamples=50)
        assert not apart.one_seed
        assert "one seed" not in str(apart)


def test_what_cannot_be_compared_is_named():
    V = torch.eye(2, dtype=torch.float64).expand(30, 2, 2)
    one = trajectory(V)
    late = shaped.Trajectory(torch.tensor([2.0], dtype=torch.float64), one.V, one.stopped)
    for call, words in (
        (lambda: shaped.compare(one, late), ["at must", "t = 1 and 2"]),
        (lambda: shaped.compare(one, one, at=3), ["at must", "1 recorded", "-1 to 0", "3"]),
        (lambda: shaped.compare(one, one, at=False), ["at must", "False"]),
        (lambda: shaped.compare(one, one, statistics=[]), ["statistics must", "at least one", "[]"]),
        (lambda: shaped.compare(one, one, statistics={}), ["statistics must", "at least one", "{}"]),
        (lambda: shaped.compare(one, one, statistics=3), ["statistics must", "3"]),  # pyright: ignore[reportArgumentType]
        (lambda: shaped.compare(one, one, statistics=len), ["statistics must", "len"]),  # pyright: ignore[reportArgumentType]
        (lambda: shaped.compare(one, one, statistics=[["rho"]]), ["statistics must", "['rho']"]),  # pyright: ignore[reportArgumentType]
        (lambda: shaped.compare(one, one, statistics={"none": lambda V: V[:, :0, 0]}), ["statistics must", "none"]),
        (lambda: shaped.compare(one, one, statistics={"turned": lambda V: 1j * V[:, 0, 0]}), ["statistics must", "complex", "turned"]),
        (lambda: shaped.compare(one, one, statistics={"odd": lambda V: V[:, 0, 0] * math.nan}), ["statistics", "odd"]),
        (lambda: shaped.compare(trajectory(V[:, :1, :1]), trajectory(V[:, :1, :1]), statistics="rho"), ["statistics", "rho"]),
        (lambda: shaped.compare(one, one, pair=(1, 1)), ["pair must", "different", "rho", "(1, 1)"]),
        (lambda: shaped.compare(one, one, statistics="rho", pair=(1, -1)), ["pair must", "different", "(1, -1)"]),
        (lambda: shaped.compare(one, one, pair=(0, 1, 1)), ["pair"]),  # pyright: ignore[reportArgumentType] (wrong on purpose)
    ):
        with refused(*words):
            call()
