from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedfactor.factor import svd
from fedfactor.factor.svd import truncated_svd


def gaussian(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_spectrum(values: Tensor, rows: int, columns: int) -> Tensor:
    left = torch.linalg.qr(gaussian(rows, len(values), torch.float64, 1)).Q
    right = torch.linalg.qr(gaussian(columns, len(values), torch.float64, 2)).Q
    return (left * values.double()) @ right.T


def make(kind: str, rows: int, columns: int) -> Tensor:
    side = min(rows, columns)
    i = torch.arange(1, side + 1, dtype=torch.float64)
    if kind == "gaussian":
        return gaussian(rows, columns, torch.float64)
    if kind == "trained":
        noise = gaussian(rows, columns, torch.float64) / math.sqrt(columns)
        return with_spectrum(5 / i.sqrt(), rows, columns) + 0.1 * noise
    if kind == "steep":
        return with_spectrum(1 / i, rows, columns)
    if kind == "exponential":
        return with_spectrum(10 ** (-8 * (i - 1) / (side - 1)), rows, columns)
    if kind == "low_rank":
        return gaussian(rows, 7, torch.float64, 3) @ gaussian(7, columns, torch.float64, 4)
    if kind == "repeated":
        return with_spectrum(torch.where(i <= side // 2, 2.0, 1.0), rows, columns)
    assert kind == "zero"
    return torch.zeros(rows, columns, dtype=torch.float64)


KINDS = ["gaussian", "trained", "steep", "exponential", "low_rank", "repeated", "zero"]


def check_promise(matrix: Tensor, rank: int) -> None:
    """The error is at most 1.01 of the optimum plus 1e-6 of the norm, and the triplets are well formed."""
    U, S, Vh = truncated_svd(matrix, rank)
    assert U.shape == (matrix.shape[0], rank) and S.shape == (rank,) and Vh.shape == (rank, matrix.shape[1])
    assert U.dtype == S.dtype == Vh.dtype == matrix.dtype
    exact = matrix.double()
    optimum = torch.linalg.svdvals(exact)[rank:].norm()
    error = (exact - (U.double() * S.double()) @ Vh.double()).norm()
    assert error <= 1.01 * optimum + 1e-6 * exact.norm()
    assert (S[:-1] >= S[1:]).all() and (S >= 0).all()
    identity = torch.eye(rank, dtype=torch.float64)
    for rows in (U.double().T, Vh.double()):
        torch.testing.assert_close(rows @ rows.T, identity, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "rank"),
    [(288, 300, 48), (300, 288, 3), (272, 272, 68), (48, 90, 24), (90, 48, 48), (2, 2, 1)],
)
def test_error_is_close_to_the_optimum(kind: str, rows: int, columns: int, rank: int, dtype: torch.dtype) -> None:
    check_promise(make(kind, rows, columns).to(dtype), rank)


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (1, 400), (33, 1), (3, 2)])
def test_tiny_and_one_row(size: tuple[int, int]) -> None:
    check_promise(gaussian(*size), 1)


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e18, 1e30])
@pytest.mark.parametrize("size", [(260, 270), (40, 50)])
def test_squares_out_of_range(size: tuple[int, int], scale: float) -> None:
    U, S, Vh = truncated_svd(gaussian(*size) * scale, 20)
    ours = ((U * (S / scale)) @ Vh).double()
    error = (gaussian(*size).double() - ours).norm()
    assert error <= 1.01 * torch.linalg.svdvals(gaussian(*size).double())[20:].norm()


def test_pufferfish_example() -> None:
    # W = [[3, 0], [4, 5]] has sigma = sqrt(45), sqrt(5); u_1 = (1, 3) / sqrt(10), v_1 = (1, 1) / sqrt(2).
    matrix = torch.tensor([[3.0, 0.0], [4.0, 5.0]])
    U, S, Vh = truncated_svd(matrix, 1)
    product = (U * S) @ Vh
    torch.testing.assert_close(product, torch.tensor([[1.5, 1.5], [4.5, 4.5]]))
    assert S.item() == pytest.approx(6.708204)
    assert (matrix - product).norm().item() == pytest.approx(2.236068)


def test_singular_values_by_hand() -> None:
    # A diagonal matrix of side 64: its singular values are the entries, its vectors the axes.
    U, S, Vh = truncated_svd(torch.diag(torch.arange(1.0, 65.0)), 20)
    torch.testing.assert_close(S, torch.arange(64.0, 44.0, -1.0))
    torch.testing.assert_close(U.abs(), torch.eye(64)[:, 44:].flip(1), rtol=0, atol=1e-5)
    torch.testing.assert_close(U.T, Vh, rtol=0, atol=1e-5)


def test_gaussian_needs_no_full_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[int] = []
    eigh = torch.linalg.eigh

    def watched(matrix: Tensor) -> tuple[Tensor, Tensor]:
        sides.append(matrix.shape[0])
        return eigh(matrix)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("full decomposition")

    monkeypatch.setattr(torch.linalg, "svd", never)
    monkeypatch.setattr(torch.linalg, "eigh", watched)
    truncated_svd(gaussian(384, 384), 64)
    assert sides == [84], "the filter works in a block of 64 + 16 + 4 vectors"
    truncated_svd(gaussian(64, 576), 32)
    assert sides == [84, 64]


def test_a_missed_direction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The block is kept off the strongest direction: the filter must not pass this off as the optimum.
    matrix = make("trained", 300, 300).float()
    top = torch.linalg.svd(matrix).U[:, 0]
    sketch = svd._sketch

    def blind(gram: Tensor, width: int) -> Tensor:
        block = sketch(gram, width)
        return block - torch.outer(block @ top, top)

    monkeypatch.setattr(svd, "_sketch", blind)
    monkeypatch.setattr(svd, "ROUNDS", 1)
    check_promise(matrix, 40)


def test_proof_accepts_the_optimum_and_nothing_far_from_it() -> None:
    gram = svd._gram(gaussian(300, 300, torch.float64))
    values, vectors = svd._eigenpairs(gram)
    best = values[:50], vectors[:50], vectors[:50] @ gram
    assert svd._proved(gram, gram.trace(), *best, 40)
    shifted = values[3:53], vectors[3:53], vectors[3:53] @ gram
    assert not svd._proved(gram, gram.trace(), *shifted, 40)


@pytest.mark.parametrize("side", [1, 7, 32, 43, 64])
def test_gram_matrix(side: int) -> None:
    matrix = gaussian(side, 70, torch.float64)
    torch.testing.assert_close(svd._gram(matrix), matrix @ matrix.T)


def test_same_bits_whatever_the_global_seed() -> None:
    matrix = gaussian(320, 300)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = truncated_svd(matrix, 50)
    assert torch.equal(torch.get_rng_state(), state), "no global random number is drawn"
    torch.manual_seed(2)
    second = truncated_svd(matrix.clone(), 50)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("size", [(40, 50), (64, 576)])
def test_same_bits_wherever_the_matrix_lies(size: tuple[int, int]) -> None:
    matrix = gaussian(*size)
    unaligned = torch.empty(matrix.numel() + 1)[1:].view(size).copy_(matrix)
    by_columns = matrix.T.contiguous().T
    first = truncated_svd(matrix, 30)
    for same in (unaligned, by_columns):
        assert all(torch.equal(a, b) for a, b in zip(first, truncated_svd(same, 30), strict=True))


def test_input_is_left_alone_and_gradients_are_not_asked_for() -> None:
    matrix = gaussian(40, 50).requires_grad_()
    before = matrix.detach().clone()
    assert not any(part.requires_grad for part in truncated_svd(matrix, 5))
    assert torch.equal(matrix.detach(), before)


def test_half_precision_works_in_single() -> None:
    matrix = gaussian(40, 50).half()
    U, S, Vh = truncated_svd(matrix, 40)
    assert U.dtype == S.dtype == Vh.dtype == torch.float16
    assert ((U.float() * S.float()) @ Vh.float() - matrix.float()).norm() <= 2e-3 * matrix.float().norm()


@pytest.mark.parametrize("rank", [0, 4, -1])
def test_rank_out_of_range(rank: int) -> None:
    with pytest.raises(ValueError, match=r"rank must lie in \[1, 3\]"):
        truncated_svd(torch.ones(3, 5), rank)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    share=st.floats(0, 1),
    decay=st.floats(0, 3),
    seed=st.integers(0, 9),
)
def test_promise_on_any_matrix(rows: int, columns: int, share: float, decay: float, seed: int) -> None:
    side = min(rows, columns)
    weights = torch.arange(1, columns + 1) ** -decay
    check_promise(gaussian(rows, columns, seed=seed) * weights, max(1, round(share * side)))


@pytest.mark.parametrize("rows, columns", [(300, 300), (256, 2304)])
@pytest.mark.parametrize("decay", [0.1, 0.3])
def test_spectra_that_fall_below_single_precision(rows: int, columns: int, decay: float) -> None:
    """At half rank the optimum is far below the rounding of float32; the result may add 1e-6 of the norm, no more."""
    rng = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(rows, rows, generator=rng, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, rows, generator=rng, dtype=torch.float64)).Q
    values = torch.exp(-decay * torch.arange(rows, dtype=torch.float64))
    matrix = ((left * values) @ right.T).float()
    U, S, Vh = (part.double() for part in truncated_svd(matrix, rows // 2))
    error = torch.linalg.vector_norm(matrix.double() - (U * S) @ Vh)
    optimum = torch.linalg.vector_norm(values[rows // 2 :])
    assert float(error) <= 1.01 * float(optimum) + 1e-6 * float(torch.linalg.vector_norm(matrix.double()))
