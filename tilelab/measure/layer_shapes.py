"""The matrix products in the layers of six open language models, as their configuration files give the sizes.

A layer multiplies a (tokens, K) with a weight (N, K). Products that read the same input are one product: query, key and
value, or gate and up. Source: config.json of each model on huggingface.co.
"""

TABLE = """\
Llama 3 8B: q, k, v 6144 4096; o 4096 4096; gate, up 28672 4096; down 4096 14336
Llama 3 70B: q, k, v 10240 8192; o 8192 8192; gate, up 57344 8192; down 8192 28672
Qwen 3 8B: gate, up 24576 4096; down 4096 12288
Qwen 3 32B: q, k, v 10240 5120; o 5120 8192; gate, up 51200 5120; down 5120 25600
gpt-oss: q, k, v 5120 2880; o 2880 4096
DeepSeek-V3: q a, kv a 2112 7168; q b 24576 1536; kv b 32768 512; o 7168 16384; shared gate, up 4096 7168; \
shared down 7168 2048
"""
# {model: {product: (N, K)}}. The other products of Qwen 3 8B are Llama's.
LAYERS: dict[str, dict[str, tuple[int, int]]] = {}
for model, products in (line.split(": ") for line in TABLE.splitlines()):
    sizes = (product.rsplit(" ", 2) for product in products.split("; "))
    LAYERS[model] = {layer: (int(n), int(k)) for layer, n, k in sizes}

TOKENS = (16, 64, 256, 1024, 4096)


def list_products() -> list[tuple[str, tuple[int, int, int]]]:
    """Return ("model, layer", (M, N, K)) for each number of TOKENS and each layer."""
    return [
        (f"{model}, {layer}", (m, n, k))
        for m in TOKENS
        for model, layers in LAYERS.items()
        for layer, (n, k) in layers.items()
    ]
