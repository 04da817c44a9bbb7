"""Datagrams, a stated share of which may be lost."""

from lightning_topt.communication.methods.bounded_loss.bounded_loss_method import (
    BoundedLoss as BoundedLoss,
)
