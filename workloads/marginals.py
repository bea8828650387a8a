"""Distributions of one size, drawn through their inverse CDF, and the Gaussian copula that ties sizes together."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeGuard

import numpy as np
from scipy import special

from entrain_bench.base.arithmetic import matmul, sine_of_turns
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.specs.parse import Allowed, check_mapping, parse

# Halvings of a mixture's bracket: relative precision 2**-48 of its width.
_BISECTIONS = 48


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


POSITIVE = Allowed(lambda value: _is_number(value) and 0 < value < math.inf, "a finite number above 0")
_NOT_NEGATIVE = Allowed(lambda value: 0 <= value < math.inf, "a finite number of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marginal(ABC):
    """A distribution of sizes; values outside ``[min, max]`` are moved to the nearer bound."""

    min: float = -math.inf
    max: float = math.inf

    def _check(self, where: str) -> None:
        require(self.min <= self.max, f"{where}.min", self.min, f"at most max={self.max}")

    def ppf(self, u: FloatArray) -> FloatArray:
        """Inverse CDF at probabilities ``u`` in [0, 1), element by element."""
        return np.clip(self._ppf(u), self.min, self.max)

    def cdf(self, x: FloatArray) -> FloatArray:
        """Probability of a size of at most ``x``, element by element."""
        return np.where(x < self.min, 0.0, np.where(x >= self.max, 1.0, self._cdf(x)))

    @abstractmethod
    def _ppf(self, u: FloatArray) -> FloatArray: ...

    @abstractmethod
    def _cdf(self, x: FloatArray) -> FloatArray: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantMarginal(Marginal):
    """Always ``value``."""

    value: Annotated[float, _NOT_NEGATIVE]

    def _ppf(self, u: FloatArray) -> FloatArray:
        return np.full(np.shape(u), self.value)

    def _cdf(self, x: FloatArray) -> FloatArray:
        return np.where(x >= self.value, 1.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal(Marginal):
    """Log-normal: the logarithm is normal with mean ``log(median)`` and standard deviation ``sigma``."""

    median: Annotated[float, POSITIVE]
    sigma: Annotated[float, POSITIVE]

    def _ppf(self, u: FloatArray) -> FloatArray:
        with np.errstate(over="ignore"):
            return self.median * np.exp(self.sigma * special.ndtri(u))

    def _cdf(self, x: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.asarray(special.ndtr(np.log(np.maximum(x, 0.0) / self.median) / self.sigma))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma(Marginal):
    """Gamma with the given ``shape`` and ``scale`` (mean ``shape * scale``)."""

    shape: Annotated[float, POSITIVE]
    scale: Annotated[float, POSITIVE]

    def _ppf(self, u: FloatArray) -> FloatArray:
        return np.asarray(special.gammaincinv(self.shape, u) * self.scale)

    def _cdf(self, x: FloatArray) -> FloatArray:
        return np.asarray(special.gammainc(self.shape, np.maximum(x, 0.0) / self.scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedPareto(Marginal):
    """Power law with tail exponent ``alpha`` between ``low`` and ``high`` (truncated, not clipped)."""

    alpha: Annotated[float, POSITIVE]
    low: Annotated[float, POSITIVE]
    high: Annotated[float, POSITIVE]

    def _check(self, where: str) -> None:
        Marginal._check(self, where)
        require(self.high > self.low, f"{where}.high", self.high, f"above low={self.low}")

    def _ppf(self, u: FloatArray) -> FloatArray:
        mass = 1.0 - (self.low / self.high) ** self.alpha
        return np.asarray(self.low * (1.0 - u * mass) ** (-1.0 / self.alpha))

    def _cdf(self, x: FloatArray) -> FloatArray:
        mass = 1.0 - (self.low / self.high) ** self.alpha
        return np.asarray((1.0 - (self.low / np.clip(x, self.low, self.high)) ** self.alpha) / mass)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture(Marginal):
    """One of several distributions, each with a probability; ``weights`` are normalized to sum to 1."""

    weights: tuple[Annotated[float, POSITIVE], ...]
    components: tuple[Marginal, ...]

    def _check(self, where: str) -> None:
        Marginal._check(self, where)
        many = len(self.components)
        require(many >= 1, f"{where}.components", [], "at least one distribution")
        require(len(self.weights) == many, f"{where}.weights", [*self.weights], f"one number for each of {many}")

    def _ppf(self, u: FloatArray) -> FloatArray:
        # The components' own quantiles bracket the mixture's: below them all CDFs are under u, above them all over it.
        quantiles = np.stack([component.ppf(u) for component in self.components])
        low = quantiles.min(axis=0)
        high = quantiles.max(axis=0)
        for _ in range(_BISECTIONS):
            middle = low + (high - low) / 2
            reached = self._cdf(middle) >= u
            low = np.where(reached, low, middle)
            high = np.where(reached, middle, high)
        return high

    def _cdf(self, x: FloatArray) -> FloatArray:
        shares = np.array(self.weights) / sum(self.weights)
        total = np.zeros(np.shape(x))
        for share, component in zip(shares, self.components, strict=True):
            total += share * component.cdf(x)
        return total


KINDS: Mapping[str, type[Marginal]] = {
    "constant": ConstantMarginal,
    "lognormal": LogNormal,
    "gamma": Gamma,
    "bounded_pareto": BoundedPareto,
    "mixture": Mixture,
}


def parse_marginal(config: object, where: str) -> Marginal:
    """A distribution from its YAML, a number or ``{kind: ..., parameters}``; ``UserError`` names a wrong key."""
    if _is_number(config):
        config = {"kind": "constant", "value": config}
    if not isinstance(config, Mapping) or "kind" not in config:
        raise UserError(f"{where}={config}: must be a number or a mapping with kind, one of {', '.join(sorted(KINDS))}")
    values: dict[str, Any] = dict(config)
    kind = str(values.pop("kind"))
    if kind not in KINDS:
        raise unknown_choice(f"{where}.kind", kind, KINDS)
    if isinstance(values.get("components"), list | tuple):
        parts = enumerate(values["components"])
        values["components"] = [parse_marginal(part, f"{where}.components[{i}]") for i, part in parts]
    marginal = parse(KINDS[kind], values, where)
    marginal._check(where)
    return marginal


type RankCorrelation = float | Mapping[str, Mapping[str, float]]
_CORRELATION = Allowed(lambda value: _is_number(value) and -1 <= value <= 1, "a number from -1 to 1")

# Eigenvalues above this count as zero: rounding of a singular matrix (a correlation of 1).
_EIGENVALUE_TOLERANCE = 1e-9
# Largest difference of a matrix from the square of its root.
_ROOT_TOLERANCE = 1e-6


def _spearman_matrix(names: Sequence[str], rank_correlation: RankCorrelation, where: str) -> FloatArray:
    """Spearman correlations ``[names, names]``: one value for all pairs, or ``{name: {other: value}}`` and else 0."""
    matrix = np.eye(len(names))
    if not isinstance(rank_correlation, Mapping):
        _CORRELATION.check(rank_correlation, where)
        return np.where(matrix == 1, 1.0, float(rank_correlation))
    given: dict[frozenset[str], float] = {}
    for first, others in rank_correlation.items():
        for second, value in check_mapping(others, f"{where}.{first}").items():
            field = f"{where}.{first}.{second}"
            for name in (first, second):
                if name not in names:
                    raise unknown_choice(field, str(name), names)
            require(first != second, field, value, "a pair of different names")
            _CORRELATION.check(value, field)
            other = given.setdefault(frozenset((first, second)), value)
            require(other == value, field, value, f"the pair's other value {other}")
            i = names.index(first)
            j = names.index(second)
            matrix[i, j] = matrix[j, i] = value
    return matrix


def latent_root(names: Sequence[str], rank_correlation: RankCorrelation, where: str) -> FloatArray:
    """A matrix ``root`` such that standard normals times ``root.T`` have the given rank correlations.

    Names may have one correlation for all pairs, or ``{name: {other: value}}`` and otherwise 0.
    The normals' Pearson correlation is ``2 sin(pi rho / 6)`` for a Spearman correlation rho (Pearson 1907).

    ``UserError`` for values outside [-1, 1], unknown names, contradicting pairs, and impossible correlations.
    """
    pearson = 2 * sine_of_turns(_spearman_matrix(names, rank_correlation, where) / 12)
    smallest = float(np.linalg.eigvalsh(pearson)[0])
    if smallest < -_EIGENVALUE_TOLERANCE:
        raise UserError(
            f"{where}={rank_correlation}: must be positive semi-definite over {', '.join(names)} "
            f"(smallest eigenvalue {smallest:.3g}); no data has these correlations together"
        )
    return _cholesky(pearson)


def nearest_root(spearman: FloatArray) -> FloatArray:
    """Return ``latent_root`` of measured correlations ``[names, names]``, reduced in steps of 1% until they are valid.

    Each correlation is measured over samples that have both sizes, so together they may be impossible.
    """
    diagonal = np.eye(len(spearman), dtype=bool)
    for hundredths in range(100, -1, -1):
        pearson = 2 * sine_of_turns(np.where(diagonal, 1.0, spearman * (hundredths / 100)) / 12)
        pearson[diagonal] = 1.0
        root = _cholesky(pearson)
        if np.all(np.abs(matmul(root, root.T) - pearson) < _ROOT_TOLERANCE):
            return root
    raise AssertionError("the identity has a root")


def _cholesky(matrix: FloatArray) -> FloatArray:
    """Return the lower triangular root of a positive semi-definite matrix; dependent columns are zero.

    Not LAPACK's: the last digits of its roots depend on the CPU, and of an eigenbasis sometimes all of them.
    """
    root = np.zeros_like(matrix)
    for column in range(len(matrix)):
        rest = matrix[column:, column] - matmul(root[column:, :column], root[column, :column])
        if rest[0] > _EIGENVALUE_TOLERANCE:
            root[column:, column] = rest / np.sqrt(rest[0])
    return root


def draw_latents(root: FloatArray, num_samples: int, rng: np.random.Generator) -> FloatArray:
    """Correlated standard normals ``[samples, names]``."""
    return matmul(rng.standard_normal((num_samples, len(root))), root.T)


def match_ranks(sizes: IntArray, latent: FloatArray) -> IntArray:
    """Return the size index of each sample so that sizes rise with the latent ``[samples]``; ties keep their order."""
    chosen = np.empty(len(sizes), np.int64)
    chosen[np.argsort(latent, kind="stable")] = np.argsort(sizes, kind="stable")
    return chosen
