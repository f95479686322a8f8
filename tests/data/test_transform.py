from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedfactor.data.transform import NORMS, ImageTransform, Tokens, transform
from tests.helpers import made_data as make


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_normalised_as_the_papers_do(norm: str) -> None:
    mean, std = NORMS[norm]
    batch = torch.from_numpy(make.pixels(4, 3 if len(mean) == 3 else 1, 5, 6))
    exact = (batch.double() / 255 - torch.tensor(mean).double().view(-1, 1, 1)) / torch.tensor(std).double().view(
        -1, 1, 1
    )
    found = transform(norm).test(batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-5)
    assert torch.equal(transform(norm).train(batch, rng()), found)


def test_crop_and_flip_take_windows_of_the_padded_image() -> None:
    batch = torch.from_numpy(make.pixels(64, 3, 6, 7))
    seen = set()
    for image, found in zip(batch, (ImageTransform(crop=2, flip=True).train(batch, rng(3)) * 255).round(), strict=True):
        padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
        matches: list[tuple[int, int, bool]] = []
        for down in range(5):
            for right in range(5):
                window = padded[:, down : down + 6, right : right + 7].float()
                for mirrored, candidate in ((False, window), (True, window.flip(2))):
                    if torch.equal(candidate, found):
                        matches.append((down, right, mirrored))
        assert len(matches) == 1
        seen.add(matches[0])
    # 64 draws from 50: nearly all offsets, both ways round
    assert len(seen) > 25
    assert {m for _, _, m in seen} == {False, True}
    assert {d for d, _, _ in seen} == {r for _, r, _ in seen} == set(range(5))


def test_flip_alone_mirrors_about_half() -> None:
    batch = torch.from_numpy(make.pixels(200, 1, 4, 4))
    found = (ImageTransform(flip=True).train(batch, rng()) * 255).round().to(torch.uint8)
    mirrored = (found == batch.flip(3)).flatten(1).all(1)
    kept = (found == batch).flatten(1).all(1)
    assert bool((mirrored | kept).all())
    assert 70 < int(mirrored.sum()) < 130


def test_rotation_is_a_rotation() -> None:
    """Every pixel comes from the place a rotation about the centre takes it from, by hand, oblong images included."""
    batch = torch.from_numpy(make.pixels(6, 2, 9, 15, seed=5))
    found = (ImageTransform(rotate=40.0).train(batch, rng(1)) * 255).round().to(torch.uint8).numpy()
    angles = (torch.rand((6,), generator=rng(1)) * 2 - 1).numpy() * math.radians(40)
    rows, columns = np.mgrid[0:9, 0:15]
    y, x = rows - 4.0, columns - 7.0
    for image, picture, angle in zip(batch.numpy(), found, angles, strict=True):
        from_x = math.cos(angle) * x + math.sin(angle) * y + 7
        from_y = -math.sin(angle) * x + math.cos(angle) * y + 4
        clear = (np.abs(from_x % 1 - 0.5) > 0.01) & (np.abs(from_y % 1 - 0.5) > 0.01)
        column, row = np.rint(from_x).astype(int), np.rint(from_y).astype(int)
        inside = (row >= 0) & (row < 9) & (column >= 0) & (column < 15)
        expected = np.where(inside, image[:, row.clip(0, 8), column.clip(0, 14)], 0)
        np.testing.assert_array_equal(picture[:, clear], expected[:, clear])
        assert clear.mean() > 0.8
    assert abs(angles).max() > 0.2


def test_the_generator_decides() -> None:
    batch = torch.from_numpy(make.pixels(32, 3, 8, 8))
    whole = ImageTransform(crop=4, flip=True, rotate=15.0)
    assert torch.equal(whole.train(batch, rng(1)), whole.train(batch, rng(1)))
    assert not torch.equal(whole.train(batch, rng(1)), whole.train(batch, rng(2)))
    before = torch.get_rng_state()
    whole.train(batch, rng(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(batch, torch.from_numpy(make.pixels(32, 3, 8, 8)))


def test_black_comes_in_from_outside() -> None:
    batch = torch.full((50, 1, 4, 4), 255, dtype=torch.uint8)
    found = transform("half", crop=3).train(batch, rng())
    assert set(found.unique().tolist()) == {-1.0, 1.0}


def test_tokens_become_what_embeddings_read() -> None:
    batch = torch.tensor([[1, 2], [3, 0]], dtype=torch.int16)
    assert Tokens().train(batch, rng()).dtype == Tokens().test(batch).dtype == torch.int64


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="mean has 3 values and std 1"):
        ImageTransform((0.0, 0.0, 0.0), (1.0,))
    with pytest.raises(ValueError, match="std must be positive"):
        ImageTransform((0.0,), (0.0,))
    with pytest.raises(ValueError, match="crop must be at least 0"):
        ImageTransform(crop=-1)
    with pytest.raises(ValueError, match="mean and std have 3 channels, the images have 1"):
        transform("cifar10").test(torch.zeros((1, 1, 4, 4), dtype=torch.uint8))
    assert transform(([0.5], [0.25])) == ImageTransform((0.5,), (0.25,))
