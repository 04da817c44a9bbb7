"""A few local steps, of which everything travels in a few bits."""

from lightning_topt.communication.methods.quantized_steps.quantized_steps import (
    QuantizedSteps as QuantizedSteps,
)
