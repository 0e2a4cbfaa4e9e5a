"""Copies to a device: from pinned memory to a GPU, as they are elsewhere."""

from unittest import mock

import numpy as np
import torch

from lengthwise.runtime.models.host_copies import to_device


def test_on_a_cpu_nothing_is_copied():
    values = np.arange(3)
    assert to_device(values, torch.device("cpu")).data_ptr() == values.ctypes.data


def test_the_host_never_waits_for_a_copy_to_a_gpu():
    pageable, pinned = mock.Mock(torch.Tensor, is_cuda=False), mock.Mock(torch.Tensor, is_cuda=False)
    pageable.is_pinned.return_value, pinned.is_pinned.return_value = False, True
    pageable.pin_memory.return_value = pinned
    for tensor in (pageable, pinned):
        assert to_device(tensor, torch.device("cuda")) is pinned.to.return_value
    assert pinned.to.call_args_list == 2 * [mock.call(torch.device("cuda"), non_blocking=True)]
    pageable.to.assert_not_called()
