"""The leading singular triplets of a matrix, several times faster than a full decomposition and almost as accurate.

The left singular vectors of A are the eigenvectors of the Gram matrix G = A A^T, where A is transposed if A^T A is
smaller. Three algorithms are tried in this order; the first two check their result before it is used:

1. for few triplets of a large matrix: a block of vectors, improved by a Chebyshev polynomial of G that is large
   on the wanted eigenvalues and small on the others (Zhou, Saad, Tiago & Chelikowsky 2006,
   "Self-consistent-field calculations using Chebyshev-filtered subspace iteration"). The block starts as two
   powers of G times a random matrix (Halko, Martinsson & Tropp 2011, "Finding structure with randomness"), a
   sparse one so that the first power is almost free (Clarkson & Woodruff 2013);
2. all eigenvectors of G;
3. the full decomposition of A.

The check: the error of the rank-r product is at most 1.01 times the smallest one possible (Eckart & Young).
The eigenvalues of G are squares, so singular values below about sqrt(eps) times the largest are lost in its rounding
errors. If they matter, a float32 matrix is tried again in float64, and after that with the full decomposition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedfactor.factor.base import check_range

# Errors are compared as squares: T <= 1.01^2 (T - gap) if the gap to the optimum is at most this part of T
SLACK = 0.019
# Rounding error of an eigenvalue of G, in units of eps times the largest one
ROUNDING = 4.0
# Largest deviation of the vectors of the longer side from orthonormality: rounding over the smallest eigenvalue
SKEW = 1e-3
# Below this side, a full decomposition takes hardly any time
SMALL = 32
# The filter is faster than computing all eigenvectors from this side on, for ranks up to this share of it
FILTER_SIDE = 256
FILTER_SHARE = 0.25
# A higher degree separates better, but the largest eigenvectors then dominate the others; give up after two rounds
DEGREE = 3
ROUNDS = 2


def truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (m, rank), S (rank,) in descending order, and Vh (rank, n): the leading triplets of `matrix` (m, n).

    U diag(S) Vh differs from `matrix` by at most 1.01 times the optimal error in Frobenius norm, plus
    rounding. The vectors of the shorter side are orthonormal to rounding, those of the longer one to about
    `SKEW` at worst. The same matrix gives the same bits, and no global random state is read or changed.
    """
    check_range("rank", rank, 1, min(matrix.shape))
    # A copy, because libraries round differently if the same numbers have another alignment or stride.
    least = torch.promote_types(matrix.dtype, torch.float32)
    work = matrix.detach().to(least, copy=True, memory_format=torch.contiguous_format)
    wide = work if work.shape[0] <= work.shape[1] else work.T
    for dtype in dict.fromkeys((least, torch.float64)):
        vectors = _leading(wide.to(dtype), rank)
        if vectors is not None:
            left, S, right = _complete(vectors, wide.to(dtype))
            break
    else:
        left, S, right = torch.linalg.svd(wide.double(), full_matrices=False)
        left, S, right = left[:, :rank], S[:rank], right[:rank]
    U, Vh = (left, right) if wide is work else (right.T, left.T)
    return U.to(matrix.dtype), S.to(matrix.dtype), Vh.to(matrix.dtype)


def _complete(vectors: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return left vectors (given as rows of X, r x k), values and right vectors; their product is X^T X A."""
    right = vectors @ wide
    S, order = torch.linalg.vector_norm(right, dim=1).sort(descending=True, stable=True)
    return vectors[order].T, S, right[order] / S[:, None]


def _leading(wide: Tensor, rank: int) -> Tensor | None:
    """Return the leading left vectors of `wide` (k, n), k <= n, as rows (rank, k); None if rounding hides them.

    Blocks of vectors are always rows, since X G is the faster order of that product.
    """
    side = wide.shape[0]
    if side < SMALL:
        return None
    gram = _gram(wide)
    energy = gram.trace()
    limits = torch.finfo(gram.dtype)
    if not side * limits.smallest_normal / limits.eps < energy.item() < limits.max / side:
        return None  # the squares are outside of the range of the dtype
    if side >= FILTER_SIDE and rank <= FILTER_SHARE * side:
        basis = _orthonormal(_sketch(gram, rank + rank // 4 + 4) @ gram)
        images = basis @ gram
        values = torch.linalg.eigvalsh(images @ basis.T).flip(0)
        if not _trusted(energy, values, rank):
            return None
        pairs = values, basis, images
        for _ in range(ROUNDS):
            pairs = _rayleigh_ritz(gram, _chebyshev(gram, *pairs, rank))
            if _proved(gram, energy, *pairs, rank):
                return pairs[1][:rank]
    values, vectors = _eigenpairs(gram)
    return vectors[:rank] if _trusted(energy, values, rank) else None


def _sketch(gram: Tensor, width: int) -> Tensor:
    """Return Omega G (width, k), where Omega has one Gaussian entry per column: rows of G, scaled and added up."""
    side = gram.shape[0]
    source = torch.Generator().manual_seed(0)  # of its own, so that the result depends only on the matrix
    entries = torch.randn(side, 1, generator=source, dtype=gram.dtype).to(gram.device)
    block = gram.new_zeros(width, side)
    for start in range(0, side, width):
        rows = slice(start, start + width)
        block[: side - start] += entries[rows] * gram[rows]
    return block


def _chebyshev(gram: Tensor, values: Tensor, vectors: Tensor, images: Tensor, rank: int) -> Tensor:
    """Apply T_d(2 G / cut - I) to the block X (b, k): at most 1 in size on [0, cut], growing fastest above.

    Ritz values approach the eigenvalues from below, so the one of index `rank` cuts below the wanted ones.
    """
    cut = values[rank - 1].item()
    previous, current = vectors, images * (2 / cut) - vectors
    for _ in range(DEGREE - 1):  # T_{j+1}(x) = 2 x T_j(x) - T_{j-1}(x)
        following = torch.addmm(previous, current, gram, beta=-1, alpha=4 / cut).sub_(current, alpha=2)
        previous, current = current, following
    return current


def _rayleigh_ritz(gram: Tensor, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Ritz values (b,), descending, and vectors X (b, k) of G in the span of `block` (b, k), and X G."""
    basis = _orthonormal(block)
    images = basis @ gram
    values, rotation = _eigenpairs(images @ basis.T)
    return values, rotation @ basis, rotation @ images


def _proved(gram: Tensor, energy: Tensor, values: Tensor, vectors: Tensor, images: Tensor, rank: int) -> bool:
    """Prove that the sum of the `rank` largest eigenvalues of G is at most that of the Ritz values t_i plus the gap.

    For each number mu and positive semi-definite Z with G <= mu I + Z, that sum is at most rank mu + tr Z
    (the dual of Ky Fan's maximum principle). Here Z = X^T diag(z) X with z_i = max(t_i + e_i - mu, 0): the
    small e_i cover the residual of pair i, and mu is the largest t_j + e_j that the gap still allows. G
    <= mu I + Z holds if mu I + Z - G has a Cholesky factor. Nothing is assumed about the block: if it misses a
    direction, the factorisation fails.
    """
    gap = _gap(energy, values, rank)
    residuals = torch.linalg.vector_norm(images - values[:, None] * vectors, dim=1)
    shares = residuals.clamp(min=_rounding(values)).sqrt()
    raised = values + shares * (0.7 * gap / shares[:rank].sum())
    costs = rank * raised + (raised - raised[:, None]).clamp(min=0).sum(1) - values[:rank].sum()
    affordable = raised[costs <= gap]
    if not gap > 0 or affordable.numel() == 0:
        return False
    mu = affordable.max()
    above = raised > mu
    excess = (raised[above] - mu)[:, None] * vectors[above]
    bound = torch.addmm(gram, vectors[above].T, excess, beta=-1)
    bound.diagonal().add_(mu - _rounding(values))
    return bool(torch.linalg.cholesky_ex(bound).info == 0)


def _trusted(energy: Tensor, values: Tensor, rank: int) -> bool:
    """Return whether rounding errors affect neither the error of the product nor the right vectors."""
    complete = rank == values.numel()
    return (complete or _gap(energy, values, rank) > 0) and bool(_rounding(values) <= SKEW * values[rank - 1])


def _gap(energy: Tensor, values: Tensor, rank: int) -> float:
    """Return by how much the sum of the leading eigenvalues may be too small, minus rounding errors."""
    rest = energy - values[:rank].sum()
    return float(SLACK * rest - 2 * rank * _rounding(values))


def _rounding(values: Tensor) -> Tensor:
    return ROUNDING * torch.finfo(values.dtype).eps * values[0]


def _orthonormal(block: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(block.T).Q
    return basis.T


def _eigenpairs(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, largest first, and eigenvectors as rows."""
    values, vectors = torch.linalg.eigh(symmetric)
    return values.flip(0), vectors.T.flip(0)


def _gram(wide: Tensor) -> Tensor:
    """Return A A^T (k, k), computing little more than half of it; symmetry gives the rest."""
    side = wide.shape[0]
    gram = wide.new_empty(side, side)
    step = -(-side // 8)
    for start in range(0, side, step):
        rows, below = slice(start, start + step), slice(start + step, None)
        torch.mm(wide[start:], wide[rows].T, out=gram[start:, rows])
        gram[rows, below] = gram[below, rows].T
    return gram
