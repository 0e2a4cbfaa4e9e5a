"""Checksums of weights, to compare models across ranks without sending them."""

import hashlib
from itertools import chain

import torch
from torch import Tensor, nn

_BLOCK_BYTES = 1 << 16


def weight_checksums(model: nn.Module) -> dict[str, str]:
    """Sixteen hex digits for every parameter and buffer, by name; equal for equal bits. Reads every byte once."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {name: checksum(tensor.detach()) for name, tensor in tensors}


def checksum(tensor: Tensor) -> str:
    """Hash dtype, shape and bits; on its device, blocks of 64 KiB are added up, and only the sums are hashed."""
    state = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=8)
    if tensor.numel():
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        flat = flat.clone() if flat.storage_offset() % 8 else flat  # a place in a buffer of others
        num_whole = len(flat) // _BLOCK_BYTES * _BLOCK_BYTES
        sums = flat[:num_whole].view(torch.int64).view(-1, _BLOCK_BYTES // 8).sum(1)  # modulo 2^64
        state.update(sums.cpu().numpy().tobytes())
        rest = flat[num_whole:].to("cpu", copy=True)  # storage that NumPy has seen cannot be freed by who gathered it
        state.update(rest.numpy().tobytes())
    return state.hexdigest()
