"""Per-row functions whose bits depend on the row alone.

Two facts make them so, and the kernel tests prove both: IEEE add, subtract, multiply, divide,
square root and maximum are exactly rounded, so they give the same bits in every layout; and
numpy's ``exp`` and its sum over a contiguous last axis do not change with the position in the
buffer or with the number of rows. (torch's sigmoid and silu do: a vector's tail is rounded
differently from its body.)
"""

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float32]


def array(tensor: torch.Tensor) -> Array:
    """The same float32 memory as a numpy array."""
    result: Array = tensor.numpy()
    return result


def rms_norm(x_TH: Array, weight_H: Array, eps: float, out_TH: Array) -> None:
    """x / sqrt(mean(x^2) + eps) * weight, per row; ``out_TH`` may be ``x_TH``."""
    scale_T1 = np.add.reduce(x_TH * x_TH, axis=-1, keepdims=True)
    scale_T1 /= x_TH.shape[-1]
    scale_T1 += eps
    np.sqrt(scale_T1, out=scale_T1)
    np.divide(1.0, scale_T1, out=scale_T1)
    np.multiply(x_TH, scale_T1, out=out_TH)
    out_TH *= weight_H


def rope(x_THD: Array, cos_TD: Array, sin_TD: Array) -> None:
    """Rotate the pairs (d, d + D/2) in place."""
    half = x_THD.shape[-1] // 2
    sin_T1D = sin_TD[:, None, :]
    rotated_THD = x_THD * cos_TD[:, None, :]
    rotated_THD[..., :half] -= x_THD[..., half:] * sin_T1D[..., :half]
    rotated_THD[..., half:] += x_THD[..., :half] * sin_T1D[..., half:]
    x_THD[...] = rotated_THD


def silu_mul(gate_up_TI: Array, out_TI: Array) -> None:
    """gate / (1 + exp(-gate)) * up, with gate the first half of the last axis."""
    size = out_TI.shape[-1]
    gate_TI = gate_up_TI[:, :size]
    np.negative(gate_TI, out=out_TI)
    with np.errstate(over="ignore"):  # exp(-gate) = inf below -88, where silu is 0
        np.exp(out_TI, out=out_TI)
    out_TI += 1.0
    np.divide(gate_TI, out_TI, out=out_TI)
    out_TI *= gate_up_TI[:, size:]
