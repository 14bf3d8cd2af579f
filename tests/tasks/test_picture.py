"""The picture: what it shows, that rounding reaches the matrices it says, and that training with it helps."""

import pytest
import torch

from k3lite.mx import fake_quantize
from k3lite.tasks import picture
from k3lite.tasks.picture import OURS, ROUNDINGS, SIDE, PictureMLP, as_shown, fit_picture, points, tuned


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained(one_thread):
    model = PictureMLP(seed=1)
    fit_picture(model, 60, picture.LR)
    return model


def test_the_picture_is_four_different_quarters_within_its_range():
    image = picture.picture()
    assert image.shape == (SIDE, SIDE) and image.min() >= -1 and image.max() <= 1
    half = SIDE // 2
    quarters = [image[a : a + half, b : b + half] for a in (0, half) for b in (0, half)]
    assert all(q.std() > 0.2 for q in quarters) and len(points()) == SIDE**2
    assert points()[1, 0] > points()[0, 0] and points()[1, 1] == points()[0, 1], "x runs along a row"


def test_likeness_is_by_hand(trained):
    seen = as_shown(trained, "none")
    error = (trained(points()).detach().view(SIDE, SIDE) - picture.picture()).square().mean()
    assert seen.psnr == pytest.approx(float(10 * torch.log10(4 / error)), abs=1e-4)


def test_rounded_weights_are_those_of_mx(trained):
    rounded = PictureMLP(0)
    rounded.load_state_dict(trained.state_dict())
    with torch.no_grad():
        for block in rounded.blocks:
            for w in block.values():
                w.copy_(fake_quantize(w, "e2m1"))
    assert torch.equal(as_shown(rounded, "none").shown, as_shown(trained, "MXFP4 weights").shown)
    assert trained.rounding == "none"


def test_every_rounding_shows_and_fewer_bits_lose_more(trained):
    likeness = {name: as_shown(trained, name).psnr for name in ROUNDINGS}
    assert len(set(likeness.values())) == len(ROUNDINGS) and max(likeness, key=likeness.get) == "none"
    assert likeness["MXFP8 weights and inputs"] > likeness["MXFP4 weights"] > 0


def test_training_with_rounding_helps_and_leaves_the_model_alone(trained):
    before = {k: v.clone() for k, v in trained.state_dict().items()}
    other = tuned(trained, OURS, steps=30)
    assert as_shown(other, OURS).psnr > as_shown(trained, OURS).psnr
    assert all(torch.equal(v, before[k]) for k, v in trained.state_dict().items())
