"""What would a step cost on eight GPUs? Lengths in, plans out; no torch, no GPU.

python examples/01_plan_on_a_laptop.py
"""

import numpy as np

import lengthwise as lw

# A long-tailed corpus: half of the sequences below 700 tokens, the longest twenty times that and more.
lengths = np.minimum(np.random.default_rng(0).lognormal(6.5, 1.2, 20_000).astype(np.int64) + 2, 16_384)
setup = {"model": "llama-7b", "cluster": "1x8xH200-141GB", "tokens_per_step": 400_000, "steps": 10}
comparison = lw.compare(lengths, max_stages=1, recompute="all", **setup)

for result in comparison.clusters[0].ranked:
    print(
        f"{result.policy:9} {result.tokens_per_s:9,.0f} tokens/s, {result.idle:.1%} idle, "
        f"{result.gap:.1%} above the proven bound"
    )
