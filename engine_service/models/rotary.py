"""The table of rotary cosines and sines, with the scalings that checkpoints ask for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine_service.models.config import RopeConfig


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim], float32: head_dim / 2 cosines, then as many sines."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2], radians per token."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended.

    The formula is Llama 3.1's, as in its model card's reference code.
    """
    wavelengths = 2 * math.pi / frequencies  # tokens
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    stretched = frequencies / rope.factor
    share_kept = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share_kept) * frequencies / rope.factor + share_kept * frequencies
    result = torch.where(wavelengths > shortest_stretched, stretched, blended)
    return torch.where(wavelengths < longest_kept, frequencies, result)
