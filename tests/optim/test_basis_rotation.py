"""Basis rotation against a slow twin in float64 that takes exact products of its definition."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_topt.optim import BasisRotation
from tests.optim.test_lars import make_parameters, set_gradients

MATRIX = {"step", "exp_avg", "exp_avg_sq"}
SIDES = ("left_covariance", "left_basis", "right_covariance", "right_basis")


class Slow:
    """Algorithms 1 and 2 of arXiv 2602.03515 for one matrix, in float64, with explicit sums."""

    def __init__(self, weight, *, sides=(True, True)):
        self.w, self.sides, self.t = weight.detach().double().clone(), sides, 0
        rows, columns = self.w.shape
        self.covariances = [torch.zeros(n, n, dtype=torch.double) for n in (rows, columns)]
        self.bases = [torch.eye(n, dtype=torch.double) for n in (rows, columns)]
        self.m, self.v = torch.zeros_like(self.w), torch.zeros_like(self.w)

    def step(
        self, gradient, first, *, lr, betas=(0.9, 0.95), eps=1e-8, decay=0.01, beta=None, every=10
    ):
        """One update. `first`: the bases after the first one, which may not be the only ones."""
        g, self.t = gradient.double(), self.t + 1
        beta = betas[1] if beta is None else beta
        for side, equation in enumerate(("ik,jk->ij", "ki,kj->ij")):
            self.covariances[side] *= beta
            self.covariances[side] += (1 - beta) * torch.einsum(equation, g, g)
            if self.sides[side] and self.t == 1:
                self.bases[side] = first[side].double().clone()
                assert_eigenvectors(self.bases[side], self.covariances[side])
            elif self.sides[side] and self.t % every == 0:
                self._refresh(side)
        left, right = self.bases
        self.m = betas[0] * self.m + (1 - betas[0]) * g
        rotated = torch.einsum("ia,ij,jb->ab", left, g, right)
        self.v = betas[1] * self.v + (1 - betas[1]) * rotated**2
        m = torch.einsum("ia,ij,jb->ab", left, self.m, right) / (1 - betas[0] ** self.t)
        v = self.v / (1 - betas[1] ** self.t)
        update = torch.einsum("ia,ab,jb->ij", left, m / (v.sqrt() + eps), right)
        self.w = self.w - lr * decay * self.w - lr * update

    def _refresh(self, side):
        covariance, basis = self.covariances[side], self.bases[side]
        eigenvalues = [float(column @ covariance @ column) for column in basis.T]
        order = sorted(range(len(eigenvalues)), key=lambda i: -eigenvalues[i])
        self.v = self.v[order] if side == 0 else self.v[:, order]
        # Gram-Schmidt in place of QR: the same columns but for their signs
        found = []
        for column in (covariance @ basis[:, order]).T:
            for _ in range(2):  # once more, for what rounding leaves
                for other in found:
                    column = column - (column @ other) * other
            found.append(column / column.norm())
        self.bases[side] = torch.stack(found, dim=1)


def assert_eigenvectors(basis, covariance):
    """Orthonormal, and by falling eigenvalue."""
    torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis), dtype=torch.double))
    diagonal = basis.T @ covariance @ basis
    assert (diagonal.diag().diff() < 1e-9).all()
    torch.testing.assert_close(diagonal, diagonal.diag().diag(), rtol=0, atol=1e-9)


def first_bases(optimizer, parameter):
    return [optimizer.state[parameter].get(f"{side}_basis") for side in ("left", "right")]


def sized_gradient(shape, step):
    """Gradients with directions of their own size, so that eigenvalues are well apart."""
    generator = torch.Generator().manual_seed(7)
    left, right = (
        torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.double)).Q for n in shape
    )
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.double)
    sizes = [0.5 ** torch.arange(n, dtype=torch.double) for n in shape]
    return left @ (sizes[0][:, None] * noise * sizes[1]) @ right.T


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)])
@pytest.mark.parametrize(
    ("options", "slow_options"),
    [
        ({}, {}),
        ({"refresh_every": 1, "weight_decay": 0.0}, {"every": 1, "decay": 0.0}),
        (
            {"betas": (0.5, 0.9), "eps": 1e-3, "covariance_beta": 0.7, "refresh_every": 3},
            {"betas": (0.5, 0.9), "eps": 1e-3, "beta": 0.7, "every": 3},
        ),
    ],
)
def test_follows_the_paper(shape, options, slow_options):
    [parameter] = make_parameters([shape], dtype=torch.float64)
    optimizer, slow = BasisRotation([parameter], lr=0.01, **options), Slow(parameter)
    for step in range(25):
        parameter.grad = sized_gradient(shape, step)
        rate = optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.step()
        slow.step(parameter.grad, first_bases(optimizer, parameter), lr=rate, **slow_options)
    torch.testing.assert_close(parameter.detach(), slow.w, rtol=1e-7, atol=1e-7)


def test_a_long_side_keeps_its_coordinates():
    [parameter] = make_parameters([(3, 6)], dtype=torch.float64)
    optimizer = BasisRotation([parameter], lr=0.01, max_dimension=5)
    slow = Slow(parameter, sides=(True, False))
    for step in range(12):
        parameter.grad = sized_gradient((3, 6), step)
        optimizer.step()
        slow.step(parameter.grad, first_bases(optimizer, parameter), lr=0.01)
    torch.testing.assert_close(parameter.detach(), slow.w, rtol=1e-7, atol=1e-7)
    assert set(optimizer.state[parameter]) == MATRIX | set(SIDES[:2])


def test_where_nothing_is_rotated_it_is_adamw():
    parameters, others = make_parameters(), make_parameters()
    rotation = BasisRotation(parameters, lr=0.01, weight_decay=0.1, rotate=False)
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(12):
        set_gradients(parameters, step=step)
        set_gradients(others, step=step)
        rotation.step()
        adamw.step()
    for parameter, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)


def test_diagonal_covariances_rotate_nothing():
    """Gradients on the diagonal have the coordinate axes as their eigenvectors."""
    [parameter], [other] = (make_parameters([(3, 3)], dtype=torch.float64) for _ in range(2))
    rotation = BasisRotation([parameter], lr=0.01, refresh_every=2)
    adamw = torch.optim.AdamW([other], lr=0.01, betas=(0.9, 0.95))
    for step in range(9):
        size = torch.tensor([1.0, 9.0, 3.0]) * (1 + step % 2)
        parameter.grad, other.grad = (torch.diag(size).double() for _ in range(2))
        rotation.step()
        adamw.step()
    torch.testing.assert_close(parameter, other)


def test_it_turns_with_the_gradients():
    """Rotated gradients give the rotated update, which AdamW's do not."""
    generator = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.double)).Q

    def moved(make, *, turned):
        parameter = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.double))
        optimizer = make([parameter], lr=0.01, weight_decay=0.0)
        for step in range(15):
            gradient = sized_gradient((4, 3), step)
            parameter.grad = turn @ gradient if turned else gradient
            optimizer.step()
        return parameter.detach()

    expected = turn @ moved(BasisRotation, turned=False)
    torch.testing.assert_close(moved(BasisRotation, turned=True), expected, rtol=1e-5, atol=1e-6)
    adamw = moved(torch.optim.AdamW, turned=True) - turn @ moved(torch.optim.AdamW, turned=False)
    assert adamw.abs().max() > 0.01


def test_resumes_exactly():
    parameters, others = make_parameters(), make_parameters()
    optimizer = BasisRotation(parameters, lr=0.1, refresh_every=2)
    for step in range(6):
        set_gradients(parameters, step=step)
        optimizer.step()
        if step == 2:
            for other, parameter in zip(others, parameters, strict=True):
                other.data.copy_(parameter)
            resumed = BasisRotation(others)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif step > 2:
            set_gradients(others, step=step)
            resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


def test_gradients_of_zero_move_nothing():
    [parameter] = make_parameters([(3, 4)])
    before = parameter.detach().clone()
    optimizer = BasisRotation([parameter], weight_decay=0.0, refresh_every=1)
    for _ in range(3):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert torch.equal(parameter, before)


def test_bfloat16_matrices():
    """Bases are computed in float32: rounded, they are orthonormal to bfloat16's precision."""
    [parameter], [before] = (make_parameters([(8, 6)], dtype=torch.bfloat16) for _ in range(2))
    optimizer = BasisRotation([parameter], lr=0.01, refresh_every=2)
    for step in range(9):
        parameter.grad = sized_gradient((8, 6), step).bfloat16()
        optimizer.step()
    for name, size in (("left_basis", 8), ("right_basis", 6)):
        basis = optimizer.state[parameter][name]
        assert basis.dtype == torch.bfloat16
        torch.testing.assert_close(
            basis.float().T @ basis.float(), torch.eye(size), rtol=0, atol=0.02
        )
    assert 0.01 < (parameter - before).abs().max() < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refresh_every": 0}, "refresh_every >= 1"),
        ({"covariance_beta": 1.0}, "covariance_beta=1.0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        BasisRotation(make_parameters(), **options)


def test_sharded_matrices_are_refused(monkeypatch):
    [parameter] = make_parameters([(4, 4)])
    parameter.grad = torch.ones(4, 4)
    monkeypatch.setattr("lightning_topt.optim.adam_variants.DTensor", torch.nn.Parameter)
    with pytest.raises(ValueError, match="whole matrices"):
        BasisRotation([parameter]).step()
