"""The matrix products in the layers of open language models, as their configuration files give the sizes.

A layer multiplies a (tokens, K) with a weight (N, K). Products that read the same input are one product: query, key and
value, or gate and up. Source: config.json of each model on huggingface.co.

A figure on shapes that a choice was made with is no result. So there are three disjoint sets:

- LAYERS, at any number of tokens: what tables and models of time may learn from;
- VALIDATION: looked at while the choices were developed, but in no table;
- HELD_OUT: in no table, and not looked at before the choices were final. Headlines are of this set.
"""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean

TABLE = """\
Llama 3 8B: q, k, v 6144 4096; o 4096 4096; gate, up 28672 4096; down 4096 14336
Llama 3 70B: q, k, v 10240 8192; o 8192 8192; gate, up 57344 8192; down 8192 28672
Qwen 3 8B: gate, up 24576 4096; down 4096 12288
Qwen 3 32B: q, k, v 10240 5120; o 5120 8192; gate, up 51200 5120; down 5120 25600
gpt-oss: q, k, v 5120 2880; o 2880 4096
DeepSeek-V3: q a, kv a 2112 7168; q b 24576 1536; kv b 32768 512; o 7168 16384; shared gate, up 4096 7168; \
shared down 7168 2048
"""
VALIDATION_TABLE = """\
Mistral Small 24B: q, k, v 6144 5120; o 5120 4096; gate, up 65536 5120; down 5120 32768
Gemma 3 27B: q, k, v 8192 5376; o 5376 4096; gate, up 43008 5376; down 5376 21504
Phi-4: q, k, v 7680 5120; o 5120 5120; gate, up 35840 5120; down 5120 17920
Falcon 3 10B: q, k, v 5120 3072; o 3072 3072; gate, up 46080 3072; down 3072 23040
Qwen 2.5 7B: q, k, v 4608 3584; o 3584 3584; gate, up 37888 3584; down 3584 18944
"""
HELD_OUT_TABLE = """\
Yi 34B: q, k, v 9216 7168; o 7168 7168; gate, up 40960 7168; down 7168 20480
InternLM 2.5 20B: q, k, v 8192 6144; o 6144 6144; gate, up 32768 6144; down 6144 16384
OLMo 2 13B: q, k, v 15360 5120; gate, up 27648 5120; down 5120 13824
Command R 35B: q, k, v 24576 8192; gate, up 45056 8192; down 8192 22528
Granite 3 2B: q, k, v 3072 2048; o 2048 2048; gate, up 16384 2048; down 2048 8192
"""


def _read(table: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Return {model: {product: (N, K)}}."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for model, products in (line.split(": ") for line in table.splitlines()):
        sizes = (product.rsplit(" ", 2) for product in products.split("; "))
        found[model] = {layer: (int(n), int(k)) for layer, n, k in sizes}
    return found


# The other products of Qwen 3 8B are Llama's.
LAYERS, VALIDATION, HELD_OUT = map(_read, (TABLE, VALIDATION_TABLE, HELD_OUT_TABLE))
TOKENS = (16, 64, 256, 1024, 4096)
HELD_OUT_TOKENS = (1, 3, 24, 40, 72, 100, 160, 240, 384, 700, 1500, 2500, 6000)
HELD_OUT_OTHERS = (
    *((side, side, side) for side in (1536, 3072, 5120, 6144)),
    *((333, 1000, 1000), (777, 5000, 3000), (50, 1032, 9000), (2222, 3336, 1112)),
)


def _list(models: dict[str, dict[str, tuple[int, int]]], tokens) -> list[tuple[str, tuple[int, int, int]]]:
    return [
        (f"{model}, {layer}", (m, n, k))
        for m in tokens
        for model, layers in models.items()
        for layer, (n, k) in layers.items()
    ]


def list_products() -> list[tuple[str, tuple[int, int, int]]]:
    """Return ("model, layer", (M, N, K)) for each number of TOKENS and each of LAYERS."""
    return _list(LAYERS, TOKENS)


def list_held_out() -> list[tuple[str, tuple[int, int, int]]]:
    """Return ("model, layer", (M, N, K)) for each number of HELD_OUT_TOKENS and layer, then squares and odd extents."""
    return _list(HELD_OUT, HELD_OUT_TOKENS) + [("another shape", shape) for shape in HELD_OUT_OTHERS]


MANY = 2**31
TOKEN_RANGES = (
    *(("1", 1, 1), ("2 to 64", 2, 64), ("65 to 512", 65, 512), ("513 to 4,096", 513, 4096)),
    *(("more", 4097, MANY), ("all", 1, MANY)),
)


def summarise(sets: Mapping[str, Sequence[dict]]) -> list[dict]:
    """Return for each set of rows, and for each range of tokens (M), the ratios' geometric mean and lowest.

    A row has `shape` and `ratio`. `below_0.95` is the share of shapes with a smaller ratio.
    """
    found = []
    for name, rows in sets.items():
        for tokens, fewest, most in TOKEN_RANGES:
            ratios = [row["ratio"] for row in rows if fewest <= row["shape"][0] <= most]
            if not ratios:
                continue
            below = sum(ratio < 0.95 for ratio in ratios) / len(ratios)
            found.append(
                {
                    "shapes": name,
                    "tokens": tokens,
                    "count": len(ratios),
                    "geometric_mean": geometric_mean(ratios),
                }
                | {"lowest": min(ratios), "below_0.95": below}
            )
    return found
