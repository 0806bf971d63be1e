"""Which curve a set of forward passes speaks for.

Owns: the terms of a pass, sums over many passes, the curve that fits sums best.
Does not own: which passes are summed, or what a fit is drawn to (latency.py).
Invariant: coefficients are never negative; what the passes say nothing of stays as the prior has it.
Source: least squares in information form: sums can be added, decayed and brought to another speed. Errors
        count relative to a pass's time: a long prefill does not drown the decode passes beside it, nor a slow
        worker the fast ones.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from dynamo_poa.values import KV_LIMIT_FRAC, KV_PRESSURE_FRAC, Curve

FloatArray = NDArray[np.float64]

MIN_PASS_S = 1e-5  # errors of shorter passes count as if they took so long
TERMS = len(Curve.__struct_fields__)
NOTHING_FRAC = 1e-12  # of all evidence: what has decayed to this is gone, smaller numbers drown in rounding


def pressure(kv_frac: float | FloatArray) -> Any:
    """Return the singular factor of a nearly full KV cache, without a unit; 0 up to KV_PRESSURE_FRAC.

        1 / (1 - u / u_max) - 1 / (1 - 0.8 / u_max)      with u held within [0.8, 1]

    Returns:  a number for a number, an array for an array.
    Source:   paper eq. 9. Blocks that requests share count once for each, so `kv_frac` may exceed 1.
    """
    used_frac = np.clip(kv_frac, KV_PRESSURE_FRAC, 1.0)
    return 1 / (1 - used_frac / KV_LIMIT_FRAC) - 1 / (1 - KV_PRESSURE_FRAC / KV_LIMIT_FRAC)


def rows_of(
    wall_s: FloatArray,
    prefill_tokens: FloatArray,
    decode_requests: FloatArray,
    kv_tokens: FloatArray,
    kv_frac: FloatArray,
) -> FloatArray:
    """Return, shape (n, 7), the terms of each of n passes in the order of Curve's fields, then its time."""
    decodes = decode_requests > 0
    return np.column_stack(
        (
            prefill_tokens > 0,
            prefill_tokens,
            decodes,
            decode_requests,
            kv_tokens,
            decodes * pressure(kv_frac),
            wall_s,
        )
    )


def curve_of(terms: FloatArray) -> Curve:
    """Return coefficients as the value everyone speaks."""
    return Curve(**dict(zip(Curve.__struct_fields__, terms.tolist(), strict=True)))


def slowed(grams: FloatArray, factors: FloatArray) -> FloatArray:
    """Return grams (..., 7, 7) of the same passes, had each taken `factors` (...) times as long."""
    scale = np.ones((*factors.shape, TERMS + 1))
    scale[..., :TERMS] = 1 / factors[..., None]  # beside a longer time the same load is less
    return grams * scale[..., None] * scale[..., None, :]


def levels(grams: FloatArray, terms: FloatArray) -> FloatArray:
    """Return how many times as long each gram's passes took as a curve says; 1 where it says nothing."""
    by_curve = grams[..., :TERMS, :TERMS] @ terms @ terms
    return np.where(by_curve > 0, grams[..., TERMS, :TERMS] @ terms / np.maximum(by_curve, 1e-300), 1.0)


class Sums(NamedTuple):
    """Weighted sums over passes.

    gram:    (7, 7): products of a pass's terms and time with each other, in shares of the pass's scale
    passes:  how many
    """

    gram: FloatArray
    passes: float

    @classmethod
    def of(cls, rows: FloatArray, weights: FloatArray, expected: FloatArray) -> "Sums":
        """Sum passes.

            scale = the longer of time taken and time expected: a hiccup then counts like any other pass

        Args:  expected: the terms of a curve known so far.
        """
        scale_s = np.maximum(np.maximum(rows[:, TERMS], rows[:, :TERMS] @ expected), MIN_PASS_S)
        shares = rows / scale_s[:, None]
        return cls((shares * weights[:, None]).T @ shares, float(weights.sum()))

    def plus(self, other: "Sums") -> "Sums":
        """Return the sums over both."""
        return Sums(self.gram + other.gram, self.passes + other.passes)

    def weighted(self, weight: float) -> "Sums":
        """Return the sums with every pass counting so many times."""
        return Sums(self.gram * weight, self.passes * weight)

    def slowed(self, factor: float) -> "Sums":
        """Return the sums of the same passes, had each taken `factor` times as long."""
        return Sums(slowed(self.gram, np.array(factor)), self.passes)

    @property
    def squares(self) -> FloatArray:
        """Return what the passes say of each term: 0 where nothing."""
        return np.diagonal(self.gram)[:TERMS]

    def level(self, terms: FloatArray) -> float:
        """Return how many times as long the passes took as a curve says; 1 where it says nothing of them."""
        return float(levels(self.gram, terms))

    def residual_frac(self, terms: FloatArray) -> float:
        """Return the root mean square of the passes' errors, each as a share of its scale."""
        errors = np.append(-terms, 1.0)
        return math.sqrt(max(0.0, errors @ self.gram @ errors) / self.passes)

    def solved(self, ridge: FloatArray, prior: FloatArray) -> FloatArray:
        """Return the non-negative terms that fit best, each drawn to its prior by its ridge."""
        matrix = self.gram[:TERMS, :TERMS] + np.diag(ridge)
        target = self.gram[TERMS, :TERMS] + ridge * prior
        terms, diagonal = prior.copy(), np.diagonal(matrix)
        # In passes, had each been of this term alone; one second stands for a term of which nothing is known.
        evidence = diagonal * np.where(prior > 0, prior, 1.0) ** 2
        seen = np.flatnonzero(evidence > NOTHING_FRAC * self.passes)
        if not seen.size:  # measured: scipy 1.17's nnls of no terms frees memory twice and ends the process
            return terms
        unit = 1 / np.sqrt(diagonal[seen])
        root = np.linalg.cholesky(matrix[seen][:, seen] * unit * unit[:, None])
        terms[seen] = unit * nnls(root.T, np.linalg.solve(root, unit * target[seen]))[0]
        return terms


NO_PASSES = Sums(np.zeros((TERMS + 1, TERMS + 1)), 0.0)
