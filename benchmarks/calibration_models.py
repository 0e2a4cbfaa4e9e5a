"""What public measurements were of: their sources, and the models and devices that presets do not have."""

from dataclasses import replace

from lengthwise.core.device_spec import DEVICES, GBIT
from lengthwise.core.specs import ModelSpec

_DGXC = "https://github.com/NVIDIA/dgxc-benchmarking/blob"
SOURCES = {
    "1": "https://github.com/mosaicml/llm-foundry/blob/061f2c7/scripts/train/benchmarking/README.md",
    "2": "https://pypi.org/project/ai2-olmo-core/1.5.0",
    "3": "https://github.com/pytorch/torchtitan/blob/31a17bf/benchmarks/llama3_h100_202412_torchtitan.md",
    "4": "https://github.com/huggingface/trl/pull/6846",
    "5": "https://docs.nvidia.com/nemo/automodel/nightly/performance-summary.html",
    "6": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
    "7": "https://github.com/Dao-AILab/flash-attention/blob/0b037c2/training/README.md",
    "9": "https://arxiv.org/abs/2307.08691, Table 1, by its count of operations",
    "8": "https://github.com/PKU-DAIR/Hetu at 9e47240, examples/hydraulis/strategy",
    "10": f"{_DGXC}/143b90d/llama3.1/README_8b.md, expected performance",
    "11": f"{_DGXC}/143b90d/llama3.1/README_70b.md, expected performance; "
    "github.com/NVIDIA/NeMo-Framework-Launcher, llama3_1_70b.yaml",
    "12": f"{_DGXC}/143b90d/llama3.1/README_405b.md, expected performance",
    "13": "https://github.com/NVIDIA/dgxc-benchmarking, llama3.1/README.md, expected performance of 405b in bfloat16",
    "14": f"{_DGXC}/0b71cfd/nemotron/README_15b.md, expected performance; "
    "github.com/NVIDIA/NeMo-Framework-Launcher, nemotron_15b.yaml",
    "15": f"{_DGXC}/143b90d/nemotron/README_340b.md, expected performance; "
    "github.com/NVIDIA/NeMo-Framework-Launcher, nemotron_340b.yaml",
    "16": f"{_DGXC}/1f6d9f4/nemotron/README.md, expected performance in bfloat16",
    "17": f"{_DGXC}/0b71cfd/nemo_megatron/README_175b.md, expected performance, and gpt3_175b_hydra.yaml beside it",
    "18": "https://github.com/FlagOpen/FlagPerf/blob/0e0fc76/training/nvidia/llama3_8B-megatron/README.md",
    "19": "https://github.com/FlagOpen/FlagPerf/blob/61ac079/training/nvidia/llama3_70B-megatron/README.md",
    "20": "https://huggingface.co/nanotron/old_bench, log_metrics.csv of each run; configurations: "
    "https://github.com/huggingface/bench_cluster at 2e2b026",
    "21": "https://arxiv.org/abs/2506.13996v1, Tables 1 to 4",
    "22": "https://github.com/snowflakedb/ArcticTraining at 2771b4b, projects/sequence-parallelism, comments of "
    "run-h200-sp1-llama-8b-*.yml",
    "23": "https://github.com/jzhang38/EasyContext/blob/1729d4f/README.md, Speed",
    "24": "https://github.com/foundation-model-stack/fms-fsdp/blob/0d31998/README.md",
    "25": "https://github.com/foundation-model-stack/fms-fsdp, its front page of a later day",
    "26": "https://github.com/pytorch/ao, torchao/float8/README.md, row without float8",
    "27": "https://github.com/pytorch/ao, torchao/prototype/mx_formats/README.md, row without mxfp8",
    "28": "https://github.com/pytorch/torchtune, README.md, Optimization flags",
    "29": "https://github.com/hpcaitech/ColossalAI, README.md (Japanese), benchmarks on H200",
    "30": "https://github.com/jzhang38/TinyLlama/blob/026587c/README.md",
}
FIRST_SOURCES = frozenset("123456789")
"""Those of the rows that presets were fitted to; all others came later and are predicted by presets."""
DEVICE_OF = {
    spec.name: spec
    for spec in (
        # Torchtitan's H100s have 500 W and HBM2e of 2.4 TB/s; its authors put their peak between the SXM's and the
        # NVL's, which this is.
        replace(DEVICES["H100-80GB"], name="H100-96GB-500W", flops_per_s=835e12, memory_bytes_per_s=2.4e12),
        # IBM's nodes of eight share 400 and 800 Gbit/s.
        replace(DEVICES["A100-80GB"], name="A100-80GB-50G", network_bytes_per_s=50 * GBIT),
        replace(DEVICES["H100-80GB"], name="H100-80GB-100G", network_bytes_per_s=100 * GBIT),
    )
}


def _model(num_layers: int, hidden_size: int, num_heads: int, **others: object) -> ModelSpec:
    sizes = {
        "num_kv_heads": num_heads, "ffn_size": 4 * hidden_size, "gated_ffn": False, "tied_embeddings": True,
        "vocab_size": 50_368, "head_size": hidden_size // num_heads, **others,
    }  # fmt: skip
    return ModelSpec(
        name="generic", family="generic", num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads, **sizes
    )


_LLAMA_3 = {"num_kv_heads": 8, "gated_ffn": True, "vocab_size": 128_256, "tied_embeddings": False}
_LLAMA_2 = {"gated_ffn": True, "vocab_size": 32_000, "tied_embeddings": False}
_OLMO = {"gated_ffn": True, "vocab_size": 100_352, "tied_embeddings": False}
_NEMOTRON = {"num_kv_heads": 8, "vocab_size": 256_000, "tied_embeddings": False}
MODELS = {
    "mpt-760m": _model(24, 1536, 12), "mpt-1b": _model(24, 2048, 16), "mpt-3b": _model(32, 2560, 20),
    "mpt-7b": _model(32, 4096, 32), "mpt-13b": _model(40, 5120, 40), "mpt-30b": _model(48, 7168, 56),
    "mpt-70b": _model(80, 8192, 64), "gpt3-125m": _model(12, 768, 12), "gpt3-355m": _model(24, 1024, 16),
    "gpt3-760m": _model(24, 1536, 16), "gpt3-1.3b": _model(24, 2048, 16), "gpt3-2.7b": _model(32, 2560, 20),
    "gpt3-175b": _model(96, 12_288, 96, vocab_size=51_200),
    "llama-3-8b": _model(32, 4096, 32, ffn_size=14_336, **_LLAMA_3),
    "llama-3-70b": _model(80, 8192, 64, ffn_size=28_672, **_LLAMA_3),
    "llama-3.2-3b": _model(28, 3072, 24, ffn_size=8192, **{**_LLAMA_3, "tied_embeddings": True}),
    **{
        name: _model(layers, 16_384, 128, ffn_size=53_248, **_LLAMA_3)
        for name, layers in (
            ("llama-3-405b", 126), ("llama-3-405b-7-layers", 7), ("llama-3-405b-21-layers", 21),
            ("llama-3-405b-42-layers", 42),
        )
    },
    "llama-2-7b": _model(32, 4096, 32, ffn_size=11_008, **_LLAMA_2),
    "llama-2-13b": _model(40, 5120, 40, ffn_size=13_824, **_LLAMA_2),
    "llama-2-70b": _model(80, 8192, 64, ffn_size=28_672, **{**_LLAMA_2, "num_kv_heads": 8}),
    "llama-34b": _model(48, 8192, 64, ffn_size=22_016, **{**_LLAMA_2, "num_kv_heads": 8}),
    "tinyllama-1.1b": _model(22, 2048, 32, ffn_size=5632, **{**_LLAMA_2, "num_kv_heads": 4}),
    "nanotron-1b": _model(24, 2048, 32, ffn_size=4096, gated_ffn=True, vocab_size=50_257),
    "nemotron-15b": _model(32, 6144, 48, **_NEMOTRON),
    "nemotron-340b": _model(96, 18_432, 96, **_NEMOTRON),
    "olmo-1b": _model(18, 2048, 16, ffn_size=8192, **_OLMO), "olmo-7b": _model(32, 4096, 32, ffn_size=11_008, **_OLMO),
    "olmo-13b": _model(40, 5120, 40, ffn_size=13_824, **_OLMO),
    "qwen3-8b": _model(36, 4096, 32, ffn_size=12_288, **{**_LLAMA_3, "vocab_size": 151_936}, head_size=128),
}  # fmt: skip
"""Sizes from the models' own configurations; MPT's agree with the numbers of parameters in its table."""
