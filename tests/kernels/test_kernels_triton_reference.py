"""The reference's own tests, of Triton's kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.ops import Ops, triton_ops
from tests.kernels import test_kernels_reference as reference

pytestmark = pytest.mark.slow

test_rms_norm = reference.test_rms_norm
test_rms_norm_of_half_precision = reference.test_rms_norm_of_half_precision_is_computed_in_float32
test_add_rms_norm_keeps_the_sum = reference.test_add_rms_norm_keeps_the_sum
test_paged_attention = reference.test_paged_attention
test_paged_attention_of_a_narrower_cache = reference.test_paged_attention_reads_a_narrower_cache
test_silu_mul = reference.test_silu_mul
test_linear_and_logits_head = reference.test_linear_and_logits_head
test_copy_blocks = reference.test_copy_blocks
test_copy_blocks_of_a_half_cache = reference.test_copy_blocks_of_a_half_cache_with_garbage_in_it


@pytest.fixture(params=[False, True], ids=["plain", "batch-invariant"])
def ops(request: pytest.FixtureRequest) -> Ops[Tensor]:
    return triton_ops(batch_invariant=request.param)


@pytest.fixture(autouse=True)
def _tensors_on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        torch.manual_seed(11)
        yield
