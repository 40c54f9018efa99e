"""What enters a model: the law of its embedding, drawn for the given tokens only, never for the whole table."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shaped.covariance import Point, factor
from shaped.engine.start import draw_directions
from shaped.layers import Norm
from shaped.randomness import Stream

Ids = Int[Tensor, " m"]


class Start(ABC):
    """Tokens before the first block. Their features are independent, and those of one feature are normal."""

    @abstractmethod
    def draw_factor(self, like: Float[Tensor, "batch _ _"], stream: Stream) -> Float[Tensor, "batch m k"]:
        """F of each sample of `like`, where F Fᵀ is the covariance of the tokens' entries in one feature."""

    def draw_gram(self, like: Float[Tensor, "batch _ _"], n: int, stream: Stream) -> Point:
        F = self.draw_factor(like, stream)
        root = F @ stream.bartlett(F, F.shape[-1], n)
        return Point(matrix=root @ root.mT / n)

    def draw_tokens(self, like: Float[Tensor, "batch _ _"], n: int, stream: Stream) -> Float[Tensor, "batch m n"]:
        F = self.draw_factor(like, stream)
        return F @ stream.normal(len(F), F.shape[-1], n)

    def draw_tokens_and_rows(
        self, like: Float[Tensor, "batch _ _"], n: int, stream: Stream
    ) -> tuple[Float[Tensor, "batch m n"], Float[Tensor, "batch rows n"]]:
        """The tokens, and the rows of their table that they fix, divided by the table's standard deviation. A tied head has these rows."""
        X = self.draw_tokens(like, n, stream)
        return X, X.new_empty(len(X), 0, n)


@dataclass(frozen=True, eq=False)
class GaussianStart(Start):
    """Sums of rows of Gaussian tables: one [m, m] covariance describes them."""

    covariance: Float[Tensor, "m m"]
    choice: Float[Tensor, "m rows"]
    """Times rows of standard normals: what the table of tokens adds. A column of zeros is the row of padding, which is 0."""
    others: Float[Tensor, "m m"]
    """The covariance without the table of tokens."""

    def draw_factor(self, like: Float[Tensor, "batch _ _"], stream: Stream) -> Float[Tensor, "batch m m"]:
        return factor(self.covariance).to(like).expand(len(like), -1, -1)

    def draw_tokens_and_rows(
        self, like: Float[Tensor, "batch _ _"], n: int, stream: Stream
    ) -> tuple[Float[Tensor, "batch m n"], Float[Tensor, "batch rows n"]]:
        choice = self.choice.to(like)
        rows = stream.normal(len(like), choice.shape[1], n) * choice.any(0)[:, None]
        X = choice @ rows
        if self.others.any():
            X = X + factor(self.others).to(like) @ stream.normal(len(like), len(choice), n)
        return X, rows


@dataclass(frozen=True, eq=False)
class GivenStart(Start):
    """Tokens whose covariance V = X Xᵀ/n is given, and the rotation of whose features is uniform."""

    V: Float[Tensor, "m m"]

    def draw_factor(self, like: Float[Tensor, "batch _ _"], stream: Stream) -> Float[Tensor, "batch m m"]:
        return factor(self.V).to(like).expand(len(like), -1, -1)

    def draw_gram(self, like: Float[Tensor, "batch _ _"], n: int, stream: Stream) -> Point:
        return Point(matrix=self.V.to(like).expand(len(like), -1, -1).contiguous())

    def draw_tokens(self, like: Float[Tensor, "batch _ _"], n: int, stream: Stream) -> Float[Tensor, "batch m n"]:
        L = self.draw_factor(like, stream)
        return math.sqrt(n) * L @ draw_directions(len(L), L.shape[-1], n, stream)


@dataclass(frozen=True)
class PatchStart(Start):
    """ViT: the class token, patches of white noise through weights of the standard deviation `std`, and positions."""

    std: float
    places: float
    """The standard deviation of the positions and of the class token."""
    patches: int
    pixels: int
    """Numbers in a patch."""

    def draw_factor(self, like: Float[Tensor, "batch _ _"], stream: Stream) -> Float[Tensor, "batch m m"]:
        root = stream.bartlett(like, self.patches, self.pixels)
        K = (self.places / self.std) ** 2 * torch.eye(self.patches + 1).to(like).repeat(len(like), 1, 1)
        K[:, 0, 0] *= 2.0
        K[:, 1:, 1:] += root @ root.mT
        return self.std * factor(K)


class Embedding(ABC):
    """A model's embedding. `norm` is applied to it before the first block."""

    norm: Norm | None

    @abstractmethod
    def choose_start(self, tokens: int | Ids) -> Start:
        """The start for a number of distinct tokens or for their ids; refuses what the model cannot read."""


@dataclass(frozen=True)
class TextEmbedding(Embedding):
    """Rows of tables of tokens, positions and token types, added. A standard deviation of 0 is no table."""

    std: float
    vocabulary: int
    padding: int | None = None
    """The id whose row is 0."""
    positions: float = 0.0
    most: int | None = None
    """The most tokens that the tables allow; None without a table of positions."""
    types: float = 0.0
    """Of the row of type 0, which all tokens share."""
    norm: Norm | None = None
    keeps_padding: bool = False
    """RoBERTa: padding has position `padding`, whose row is 0, and does not count for the positions of the others."""

    def choose_start(self, tokens: int | Ids) -> Start:
        ids = self._choose_ids(tokens) if isinstance(tokens, int) else tokens
        if self.most is not None and len(ids) > self.most:
            raise ValueError(f"tokens must be at most {self.most}, as many as the config has positions for, got {len(ids)}")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ValueError(f"tokens must be ids from 0 to {self.vocabulary - 1}, as the config's vocab_size has it, got {wrong}")
        V = self.covariance(ids)
        if not V.any():
            raise ValueError(f"tokens must not all be padding, whose embedding is 0, got {len(ids)} times {int(ids[0])}")
        return GaussianStart(V, self.choose_rows(ids), replace(self, std=0.0).covariance(ids))

    def _choose_ids(self, m: int) -> Ids:
        """The first ids that are not padding."""
        ids = torch.arange(m + 1)
        ids = ids[ids != (m if self.padding is None else self.padding)][:m]
        if int(ids[-1]) >= self.vocabulary:
            raise ValueError(f"tokens must be at most the config's vocab_size, {self.vocabulary}, without padding, got {m}")
        return ids

    def choose_rows(self, ids: Ids) -> Float[Tensor, "m rows"]:
        """Of which row each token has `std` times: a column for each distinct id, and one of zeros for padding."""
        ids = ids.to("cpu")
        padding = [] if self.padding is None else [self.padding]
        distinct = torch.tensor([*(id for id in ids.unique().tolist() if id not in padding), *padding])
        return self.std * ((ids[:, None] == distinct) & (distinct != (-1 if self.padding is None else self.padding))).double()

    def covariance(self, ids: Ids) -> Float[Tensor, "m m"]:
        """The covariance of the tokens' entries in one feature: what they share of each table."""
        ids = ids.to("cpu")
        real = (ids != self.padding) if self.padding is not None else torch.ones_like(ids, dtype=torch.bool)
        same = ((ids[:, None] == ids) & real[:, None]).double()
        places = torch.eye(len(ids), dtype=torch.float64)
        if self.keeps_padding:
            places = places * real
        return self.std**2 * same + self.positions**2 * places + self.types**2


@dataclass(frozen=True)
class PatchEmbedding(Embedding):
    """ViT's embedding of an image."""

    std: float
    places: float
    patches: int
    pixels: int
    norm: Norm | None = None

    def choose_start(self, tokens: int | Ids) -> Start:
        if not isinstance(tokens, int):
            raise ValueError("tokens must be a number or a covariance for a vision model, which has patches, got ids")
        if tokens > self.patches + 1:
            raise ValueError(f"tokens must be at most {self.patches + 1}, the class token and the patches of image_size, got {tokens}")
        return PatchStart(self.std, self.places, tokens - 1, self.pixels)
