"""Which sequences, when: corpus to index, sampler, length rules, statistics."""
