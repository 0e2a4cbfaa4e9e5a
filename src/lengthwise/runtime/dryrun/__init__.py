"""The real training step of one rank of any cluster, on fake tensors on device "cuda": no GPU, no kernels, no numbers.

What runs is what would run on the GPU: kernels, collectives, host-device synchronisations and bytes are recorded. Torch
is changed for the whole process, so :mod:`lengthwise.runtime.dryrun.process` is a process of its own.
"""
