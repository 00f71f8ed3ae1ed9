"""Time a Hugging Face model with its own experts, eager and compiled, beside one call of `ch14.moe.moe`.

transformers 5 looks the function of a model's experts up by name, so a new name is all that a model needs.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from unittest import mock

import torch

from ch14 import moe
from ch14.compiled.decoder_block import quantise_weight
from ch14.compiled.lesson.decoder_timing import compile_and_count
from ch14.moe.lesson import experiments
from tilelab.measure import bench
from tilelab.runtime import device

# Qwen 3 30B-A3B, cut to 2 of its 48 layers and to about 1/24 of its vocabulary.
SIZES = dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
SIZES |= dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128, norm_topk_prob=True)
SIZES |= dict(num_hidden_layers=2, vocab_size=6336, rope_theta=1e6)
CALLS = {"prefill": (1, 4096), "decode": (32, 1)}  # number of sequences, tokens per sequence
# The cache holds PAST tokens and has room for CAPACITY. Logits are computed for the last KEPT tokens.
PAST, CAPACITY, KEPT = 1000, 1024, 64
# {name: (name of the experts' function, whether the model is compiled)}. The first variant is the others' peer.
VARIANTS = {
    "eager": ("eager", False),
    "compiled": ("grouped_mm", True),
    "course bf16": ("tiles", True),
    "course fp8": ("tiles_fp8", True),
}


def run_experts(self, x, topk_ids, topk_weights):
    """Compute the experts of a layer, the module `self`, for x (tokens, hidden)."""
    return moe.moe(x, self.gate_up_proj, self.down_proj, topk_ids, topk_weights)


def run_fp8_experts(self, x, topk_ids, topk_weights):
    """Compute the same from the weights that `quantise_experts` has left."""
    scales = {"scale_gate_up": self.gate_up_scale, "scale_down": self.down_scale}
    return moe.moe(x, self.gate_up_fp8, self.down_fp8, topk_ids, topk_weights, **scales)


def quantise_experts(model: torch.nn.Module) -> None:
    """Give each layer's experts their weights in fp8, with scales of 128 x 128."""
    for module in (each for each in model.modules() if hasattr(each, "gate_up_proj")):
        for name in ("gate_up", "down"):
            found = [quantise_weight(weight) for weight in getattr(module, f"{name}_proj").detach()]
            for kind, tensors in zip(("fp8", "scale"), zip(*found)):
                module.register_buffer(f"{name}_{kind}", torch.stack(tensors))


def register_experts() -> None:
    """Make both functions known to transformers, as "tiles" and "tiles_fp8"."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise device.Unsupported(
            f"the experts of this transformers cannot be exchanged by name ({error}): install transformers 5."
        ) from None
    ALL_EXPERTS_FUNCTIONS.register("tiles", run_experts)
    ALL_EXPERTS_FUNCTIONS.register("tiles_fp8", run_fp8_experts)


def make_model(where: str, **sizes) -> torch.nn.Module:
    """Return Qwen 3 MoE in bf16 with random weights, and its experts' weights in fp8 besides."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    register_experts()
    config = Qwen3MoeConfig(**SIZES | sizes)
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=config.initializer_range)
    quantise_experts(model)
    return model


def use_experts(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Return a model with the same tensors, whose experts are computed by the function of this name."""
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, shared)
    model.set_experts_implementation(name)
    return model


def bind_call(model: torch.nn.Module, phase: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of token ids (sequences, tokens) that returns the logits of the last tokens.

    In "decode" each sequence has PAST random tokens in a static cache, and each call adds the same next token.
    """
    if phase == "prefill":
        return lambda ids: model(ids, use_cache=False, logits_to_keep=KEPT).logits
    from transformers import StaticCache

    config, (sequences, _) = model.config, CALLS[phase]
    weight = model.lm_head.weight
    cache = StaticCache(config=config, max_cache_len=CAPACITY)
    cache.early_initialization(
        *(sequences, config.num_key_value_heads, config.head_dim), weight.dtype, weight.device
    )
    chance = torch.Generator(weight.device).manual_seed(0)
    for layer in cache.layers:
        for each in (layer.keys, layer.values):
            random = torch.randn(each.shape, generator=chance, device=each.device)
            each[:, :, :PAST] = random[:, :, :PAST].bfloat16()

    def decode(ids):
        for layer in cache.layers:
            layer.cumulative_length.fill_(PAST)
        return model(ids, past_key_values=cache, use_cache=True).logits

    return decode


def find_cosine(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the cosine similarity of two tensors of logits, as the mean over tokens."""
    return float(torch.cosine_similarity(logits.double(), reference.double(), dim=-1).mean())


def _capture(function: Callable, ids: torch.Tensor, *_) -> Callable[[], None]:
    return bench.capture_burst([functools.partial(function, ids)], 1)


def _bind(function: Callable, ids: torch.Tensor, *_) -> Callable[[], object]:
    return functools.partial(function, ids)


def _time(
    functions: dict[str, Callable], prepare: Callable, ids, weights, peer: str
) -> dict[str, bench.Timing]:
    candidates = {name: functools.partial(prepare, function) for name, function in functions.items()}
    with mock.patch.object(bench, "GRAPH_BELOW_US", 0):  # each candidate makes its own graph, or none
        return bench.compare(candidates, lambda: (ids.clone(), *weights), peer, rounds=10, warm_s=0.1)


def measure_phase(
    models: dict[str, torch.nn.Module], reference: torch.nn.Module, phase: str, compile_graph
) -> list:
    """Compile, check and time the models in a phase; return a row for each.

    `compile_graph` is the rest of the compiler, such as Inductor's compile_fx. A cosine is that with the logits of
    `reference`, the model in float32 with its own experts. Its routers decide otherwise where two experts are nearly
    equal, and this costs eager's bf16 as much as ours.
    """
    weights, vocabulary = list(reference.parameters()), reference.config.vocab_size
    ids = torch.randint(vocabulary, CALLS[phase], device=weights[0].device)
    wanted, functions, rows = bind_call(reference, phase)(ids), {}, []
    for name, model in models.items():
        row = {"name": name, "phase": phase, "sequences": ids.shape[0], "tokens": ids.shape[1]}
        rows.append(row | {"dtype": "fp8" if "fp8" in name else "bf16", "status": "ok", "reason": ""})
        function, graphs = bind_call(model, phase), []
        if VARIANTS[name][1]:
            function, graphs = compile_and_count(function, compile_graph)
        try:
            rows[-1] |= {"cosine": find_cosine(function(ids), wanted), "graphs": len(graphs)}
            if rows[-1]["cosine"] < rows[0]["cosine"] - (0.1 if "fp8" in name else 0.02):
                rows[-1] |= {"status": "wrong", "reason": "its logits are farther from float32 than eager's"}
            functions[name] = function
        except torch.AcceleratorError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {device.first_line(error)}"[:300]
            rows[-1] |= {"status": "failed", "reason": reason}
    plain = _time(functions, _bind, ids, weights, "eager")
    graphed = {name: function for name, function in functions.items() if VARIANTS[name][1]}
    replayed = _time(graphed, _capture, ids, weights, "compiled") if "compiled" in graphed else {}
    for row in rows:
        kept = {key: row[key] for key in ("status", "reason") if row["status"] != "ok"}
        if found := plain.get(row["name"]):
            row |= found.row() | kept
        if found := replayed.get(row["name"]):
            row |= {"graph_ms": found.ms, "graph_ratio": found.ratio}
    return rows


@experiments.experiment(
    *("ch14_moe_model", run_experts, run_fp8_experts, bind_call),
    can_run=lambda: importlib.util.find_spec("transformers") is not None,
)
@torch.no_grad()
def measure_model() -> list[dict]:
    """Measure a Qwen 3 MoE of two layers in VARIANTS: a prefill, and a step of decoding."""
    from torch._inductor.compile_fx import compile_fx

    torch.manual_seed(0)
    torch._dynamo.reset()
    model = make_model("cuda")
    models = {name: use_experts(model, experts) for name, (experts, _) in VARIANTS.items()}
    reference = use_experts(model, "eager")
    reference = copy.deepcopy(reference).float()
    return [row for phase in CALLS for row in measure_phase(models, reference, phase, compile_fx)]
