"""Gaussian copula: latent normals whose ranks correlate as asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from entrain_bench.base.arithmetic import matmul, sine_of_turns
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import UserError, require, unknown_choice

type RankCorrelation = float | Mapping[str, Mapping[str, float]]

# Eigenvalues above this count as zero: rounding of a singular matrix (a correlation of 1).
_EIGENVALUE_TOLERANCE = 1e-9
# What a matrix may differ from the square of its root.
_ROOT_TOLERANCE = 1e-6


def spearman_matrix(names: Sequence[str], rank_correlation: RankCorrelation, where: str) -> FloatArray:
    """Spearman correlations ``[names, names]``: one value for all pairs, or ``{name: {other: value}}`` and else 0.

    Raises:
        UserError: for a value outside [-1, 1], an unknown name, or a pair given twice with different values.
    """
    matrix = np.eye(len(names))
    if not isinstance(rank_correlation, Mapping):
        _require_correlation(rank_correlation, where)
        return np.where(matrix == 1, 1.0, float(rank_correlation))
    given: dict[tuple[str, ...], float] = {}
    for first, others in rank_correlation.items():
        require(isinstance(others, Mapping), f"{where}.{first}", others, "a mapping from a second name to a number")
        for second, value in others.items():
            field = f"{where}.{first}.{second}"
            for name in (first, second):
                if name not in names:
                    raise unknown_choice(field, str(name), names)
            require(first != second, field, value, "a pair of different names")
            _require_correlation(value, field)
            pair = tuple(sorted((first, second)))
            require(given.setdefault(pair, value) == value, field, value, f"the pair's other value {given[pair]}")
            i = names.index(first)
            j = names.index(second)
            matrix[i, j] = matrix[j, i] = value
    return matrix


def latent_root(names: Sequence[str], rank_correlation: RankCorrelation, where: str) -> FloatArray:
    """A matrix ``root`` such that standard normals times ``root.T`` have the given rank correlations.

    The normals' Pearson correlation is ``2 sin(pi rho / 6)`` for a Spearman correlation rho (Pearson 1907).

    Raises:
        UserError: as ``spearman_matrix``, and for correlations that no distribution can have together.
    """
    pearson = 2 * sine_of_turns(spearman_matrix(names, rank_correlation, where) / 12)
    smallest = float(np.linalg.eigvalsh(pearson)[0])
    if smallest < -_EIGENVALUE_TOLERANCE:
        raise UserError(
            f"{where}={rank_correlation}: must be positive semi-definite over {', '.join(names)} "
            f"(smallest eigenvalue {smallest:.3g}); no data has these correlations together"
        )
    return _cholesky(pearson)


def nearest_root(spearman: FloatArray) -> FloatArray:
    """The same for measured correlations ``[names, names]``, weakened by hundredths until some distribution has them.

    Those of pairs are each measured over the samples that have both, so that all of them together may be impossible.
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
    """Lower triangular root of a positive semi-definite matrix; columns of what others determine are zero.

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


def _require_correlation(value: object, field: str) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool) and -1 <= value <= 1
    require(valid, field, value, "a number from -1 to 1")
