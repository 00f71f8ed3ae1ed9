"""List the shapes that the choice of "best" was fitted to, and those that only measure it."""

# Weights as (N, K): of DeepSeek-V3 (see experiments.DEEPSEEK), Llama 3, Qwen 3 and a few squares.
FITTED_WEIGHTS = (
    *((7168, 2048), (2112, 7168), (24576, 1536), (4096, 7168), (7168, 16384)),
    *((6144, 4096), (4096, 14336), (28672, 4096), (3072, 3072), (16384, 2048), (8192, 8192)),
)
FITTED_TOKENS = (8, 16, 32, 64, 96, 128, 144, 160, 208, 256, 280, 320, 400, 512, 768, 1024, 2048, 4096, 8192)
FITTED = [(m, n, k) for n, k in FITTED_WEIGHTS for m in FITTED_TOKENS]

# No table and no model has seen these.
HELD_OUT_WEIGHTS = (
    *((6144, 5120), (12288, 1536), (5120, 5120), (9216, 3072)),
    *((4096, 11008), (18944, 3584), (2048, 5632), (10240, 8192)),
)
HELD_OUT_TOKENS = (24, 48, 100, 200, 240, 384, 700, 1500, 5000)
HELD_OUT = [(m, n, k) for n, k in HELD_OUT_WEIGHTS for m in HELD_OUT_TOKENS]
