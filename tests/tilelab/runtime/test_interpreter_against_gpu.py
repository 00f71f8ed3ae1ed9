"""Do random small kernels give the same bits in the interpreter and compiled, on a GPU?

The kernels compute chains of operations, comparisons, conversions, reductions and products of bf16, fp16 and fp8.
The inputs hold NaN, infinity, subnormal numbers and ties. Each expression says what may differ:

    exact   nothing but the bits of NaN (LLVM folds conversions of integers that overflow a format; here none does)
    finite  nothing where the inputs are finite (Triton converts infinite e5m2 to bf16 in its own way)
    ulp     a GPU approximates this function, and exp(x) with an error that grows with x: 2^-18 of the result
    order   a GPU adds in its own order: the bound grows with the sum of the magnitudes

The kernels avoid what no interpreter can follow. Triton 3.6 and 3.7 show these three for sm_90a:

    undefined   uint8 of a number outside (-1, 256) is poison in LLVM. PTX has 16 bits, and a kernel that widens the
                result at once keeps them: 57344.0 gives 57344. Other integers saturate, and are the same.
    ptxas       12.8 to 13.1 drops cvt.bf16.f16 before a conversion to an integer, and takes the bits of fp16 for
                bf16. So 2.5 in float8e4nv gives 8. A way through fp32 is right.
    LLVM        computes fp32 operations in fp16 if bf16 or fp16 goes in and fp16 comes out, as if fp16 had the range
                of bf16. So 65536 - 20 gives infinity, not 65504. A way through bf16 is right.

TILELAB_RANDOM_KERNELS sets the number of kernels, of eight expressions each. As a script, this file runs a file of
kernels: `python test_interpreter_against_gpu.py KERNELS OUT cpu|cuda`.
"""

import importlib.util
import os
import pathlib
import random
import re
import subprocess
import sys

import pytest
import torch

SIZE, ROWS = 1024, 32
FLOATS = {"fp16": "tl.float16", "bf16": "tl.bfloat16", "fp32": "tl.float32"}
EIGHTS = {"e5": "tl.float8e5", "e4": "tl.float8e4nv"}
TYPES = {
    **{"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int": torch.int32},
    **{"e5": torch.float8_e5m2, "e4": torch.float8_e4m3fn},
}

HEAD = """import ch14
import triton
import triton.language as tl

@triton.jit
def larger(a, b):
    return tl.where(tl.abs(a) > tl.abs(b), a, b)

@triton.jit
def keep_first(a, i, b, j):
    return tl.where((a > b) | ((a == b) & (i < j)), a, b), tl.where((a > b) | ((a == b) & (i < j)), i, j)
"""


class Writer:
    """Writes random expressions; `leaves` maps the name of a tensor in the kernel to its type."""

    def __init__(self, dice, leaves):
        self.dice, self.leaves = dice, leaves

    def leaf(self, kind):
        name, found = self.dice.choice(sorted(self.leaves.items()))
        if found == kind:
            return name
        if found == "e5" and kind == "bf16":
            return f"{name}.to(tl.float32).to(tl.bfloat16)"
        return f"{name}.to({FLOATS[kind]})"

    def narrow(self, text, kind, name):
        """Return a conversion; from fp32 to fp16 by way of bf16 if there is bf16 in it, which LLVM gets wrong."""
        bfloats = ["bfloat16", *(each for each, found in self.leaves.items() if found == "bf16")]
        if (kind, name) == ("fp32", "tl.float16") and re.search(rf"\b({'|'.join(bfloats)})\b", text):
            text += ".to(tl.bfloat16)"
        return f"{text}.to({name})"

    def chain(self, kind, depth):
        """Return an expression of a type whose bits are the same on each machine."""
        if depth == 0:
            return self.leaf(kind)
        a, b, c = (self.chain(kind, depth - 1) if each < 2 else self.leaf(kind) for each in range(3))
        other = self.dice.choice([each for each in FLOATS if each != kind])
        constant = self.dice.choice(["0.5", "-1.5", "3", "0.0078125", "65504.0", "2"])
        return self.dice.choice(
            [
                f"({a} + {b})",
                f"({a} - {b})",
                f"({a} * {b})",
                f"({a} * {constant})",
                f"({constant} - {a})",
                f"(-{a})",
                f"tl.abs({a})",
                f"tl.maximum({a}, {b})",
                f"tl.minimum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)",
                f"tl.where({a} {self.dice.choice(['<', '<=', '>', '>=', '==', '!='])} {b}, {a}, {c})",
                f"tl.fma({a}, {b}, {c})",
                f"tl.clamp({calm(a)}, {constant} - 70000.0, {constant}).to({FLOATS[kind]})",
                self.narrow(f"({self.chain(other, depth - 1)})", other, FLOATS[kind]),
                f"tl.clamp({calm(a)}, -500.0, 500.0).to(tl.int32).to({FLOATS[kind]})",
                f"(({a} > {b}) & ({b} <= {c})).to({FLOATS[kind]})" if len({a, b, c}) == 3 else a,
            ]
        )

    def expression(self):
        """Return (text, type of the result, what may differ)."""
        dice, kind = self.dice, self.dice.choice(sorted(FLOATS))
        narrow = dice.choice(sorted(EIGHTS))
        text, short = self.chain(kind, dice.randint(1, 3)), self.chain(kind, 1)
        small = f"tl.where(tl.abs({short}) < 100.0, {short}, 1.0).to(tl.float32)"
        half = dice.choice(["fp16", "bf16"])
        first = sorted(self.leaves.items())[0]
        rows = square(text)
        plain = f"{calm(text)}.to({FLOATS[kind]})"
        return dice.choice(
            [
                *[(text, kind, "exact")] * 3,
                *[(f"({text}).to({EIGHTS[narrow]})", narrow, "exact")] * 2,
                (f"({text}).to(tl.float32).to(tl.float8e5, fp_downcast_rounding='rtz')", "e5", "exact"),
                (f"({text}).to(tl.float32).to({FLOATS[half]}, fp_downcast_rounding='rtz')", half, "exact"),
                (f"({by_float32(text)}).to(tl.int32)", "int", "exact"),
                (f"({self.leaf('fp32')}).to(tl.int16).to(tl.int32)", "int", "exact"),
                (f"{byte(by_float32(self.leaf(half)))}.to(tl.uint8).to(tl.int32)", "int", "exact"),
                (f"({first[0]}).to(tl.bfloat16)", "bf16", "finite"),
                (
                    f"{calm(self.chain(half, 1))}.to({FLOATS[half]}).to(tl.int16, bitcast=True).to(tl.int32)",
                    "int",
                    "exact",
                ),
                (f"tl.exp2({small} * 0.1)", "fp32", "ulp"),
                (f"tl.exp({small} * 0.1)", "fp32", "ulp"),
                (f"tl.log2(tl.abs({small}) + 0.125)", "fp32", "ulp"),
                (f"tl.sqrt(tl.abs({small}) + 0.125)", "fp32", "ulp"),
                (f"tl.rsqrt(tl.abs({small}) + 0.125)", "fp32", "ulp"),
                (f"tl.sigmoid({small})", "fp32", "ulp"),
                (f"{small} / (tl.abs({small}) + 0.125)", "fp32", "ulp"),
                (f"tl.div_rn({small}, tl.abs({small}) + 0.125)", "fp32", "exact"),
                (f"tl.sqrt_rn(tl.abs({small}) + 0.125)", "fp32", "exact"),
                (f"rows(tl.max({rows}, {dice.randint(0, 1)}))", "fp32" if kind != "fp32" else kind, "exact"),
                (f"rows(tl.argmax({square(plain)}, {dice.randint(0, 1)}))", "int", "exact"),
                (f"rows(tl.min({rows}, {dice.randint(0, 1)}))", "fp32", "exact"),
                (f"rows(tl.sum({square(small)}, {dice.randint(0, 1)}))", "fp32", "order"),
                (f"tl.reshape(tl.cumsum({square(small)}, {dice.randint(0, 1)}), (SIZE,))", "fp32", "order"),
                (f"rows(tl.reduce({square('tl.abs(' + plain + ')')}, 0, larger))", kind, "exact"),
                (f"tl.sort({plain})", kind, "exact"),
                (f"tl.reshape(tl.associative_scan({square(plain)}, 1, larger), (SIZE,))", kind, "size"),
                *[(self.product(), "fp32", "order")] * 3,
            ]
        )

    def product(self):
        kind = self.dice.choice(["fp16", "bf16", "e5", "e4"])
        name = {**FLOATS, **EIGHTS}[kind]
        sides = []
        for _ in range(2):
            kind = self.dice.choice(sorted(FLOATS))
            short = self.chain(kind, 1)
            sides.append(square(self.narrow(f"tl.where(tl.abs({short}) < 100.0, {short}, 1.0)", kind, name)))
        return f"tl.reshape(tl.dot({sides[0]}, {sides[1]}), (SIZE,))"


def calm(text):
    """Return an expression without NaN."""
    return f"tl.where({text} == {text}, {text}, 0.0)"


def by_float32(text):
    """Return an expression that converts tensors to bf16 by way of fp32, for a conversion to an integer."""
    return re.sub(r"\b([xyz])\.to\(tl\.bfloat16\)", r"\1.to(tl.float32).to(tl.bfloat16)", text)


def byte(text):
    """Return an expression whose values uint8 holds once their fractions are cut."""
    return f"tl.where(({text} > -1) & ({text} < 256), {text}, 7.0)"


def square(text):
    return f"tl.reshape({text}, (ROWS, ROWS))"


def write(count, seed=0):
    """Return the text of `count` kernels, and for each the types of its inputs and its eight results."""
    dice, text, kernels = random.Random(seed), HEAD, []
    for number in range(count):
        leaves = {name: dice.choice(["fp16", "bf16", "fp32", "e5", "e4"]) for name in "xyz"}
        writer = Writer(dice, leaves)
        results = [writer.expression() for _ in range(8)]
        outputs = [f"out{each}" for each in range(8)]
        parameters = f"X, Y, Z, {', '.join(outputs)}, SIZE: tl.constexpr, ROWS: tl.constexpr"
        text += f"\n\n@triton.jit\ndef kernel{number}({parameters}):\n"
        text += "    i = tl.arange(0, SIZE)\n" + "".join(
            f"    {name} = tl.load({name.upper()} + i)\n" for name in "xyz"
        )
        for output, (expression, _, _) in zip(outputs, results):
            at = "i"
            if expression.startswith("rows("):
                expression, at = expression[5:-1], "tl.arange(0, ROWS)"
            text += f"    tl.store({output} + {at}, {expression})\n"
        kernels.append((list(leaves.values()), [each[1:] for each in results]))
    return text, kernels


def make_input(kind, seed):
    """Return numbers of all magnitudes, halves of steps of the narrower formats, and special numbers."""
    random_bits = torch.Generator().manual_seed(seed)
    dtype = TYPES[kind]
    if dtype.itemsize == 1:
        return torch.arange(SIZE, dtype=torch.int32).mul(37 + 2 * seed).to(torch.uint8).view(dtype)
    near = torch.randn(SIZE, generator=random_bits) * torch.tensor([1.0, 30.0, 1e-3, 1e4]).repeat(SIZE // 4)
    ties = (torch.randint(-4096, 4096, (SIZE,), generator=random_bits) / 64.0).where(
        torch.rand(SIZE, generator=random_bits) < 0.5, near
    )
    odd = [1e-7, -6e-8, 3e-6, 5.9e-8, 1e-40, 2.0**-133, -(2.0**-149), 2.0**-14, 2.0**-17, 2.0**-10]
    odd += [65504.0, 65519.0, 65520.0, 448.0, 464.0, 465.0, 57344.0, 61440.0, 3.3e38, -3.4e38]
    odd += [2.0**31, -(2.0**31), 0.0, -0.0, float("inf"), -float("inf"), float("nan")]
    special = torch.tensor(odd)
    special = special[torch.randint(len(special), (SIZE,), generator=random_bits)]
    return ties.where(torch.rand(SIZE, generator=random_bits) < 0.85, special).to(dtype)


def run(path, out, where, count):
    """Launch each kernel of a file and save what it wrote."""
    specification = importlib.util.spec_from_file_location("random_kernels", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    _, kernels = write(count)
    found = []
    for number, (inputs, results) in enumerate(kernels):
        given = [make_input(kind, 3 * number + at).to(where) for at, kind in enumerate(inputs)]
        outputs = [torch.zeros(SIZE, dtype=TYPES[kind], device=where) for kind, _ in results]
        getattr(module, f"kernel{number}")[(1,)](*given, *outputs, SIZE, ROWS, enable_fp_fusion=False)
        found.append([each.cpu() for each in outputs])
    torch.save(found, out)


def differences(number, inputs, results, interpreted, compiled):
    """Return what differs more than it may, one line per expression."""
    found = []
    is_finite = make_input(inputs[0], 3 * number).float().isfinite()
    for at, ((kind, rule), left, right) in enumerate(zip(results, interpreted, compiled)):
        a, b = (each.double() if kind == "int" else each.float().double() for each in (left, right))
        same = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
        if rule == "finite":
            same |= ~is_finite
        elif rule == "size":  # of two numbers of one magnitude either may be found
            same |= a.abs() == b.abs()
        elif rule == "ulp":
            same |= (a - b).abs() <= 64 * 2.0**-24 * b.abs() + 2.0**-126
        elif rule == "order":
            same |= (a - b).abs() <= 1e-3 * b[b.isfinite()].abs().mean() + 1e-5 * b.abs()
        if not same.all():
            first = int((~same).nonzero()[0])
            found.append(
                f"out{at} ({kind}, {rule}): {int((~same).sum())} differ, "
                f"first at {first}: {a[first]} interpreted, {b[first]} compiled"
            )
    return found


@pytest.mark.gpu
def test_random_kernels(tmp_path):
    count = int(os.environ.get("TILELAB_RANDOM_KERNELS", 5))
    text, kernels = write(count)
    path = tmp_path / "kernels.py"
    path.write_text(text)
    outcomes = {}
    for where in ("cpu", "cuda"):
        out = tmp_path / f"{where}.pt"
        environment = {**os.environ, "TRITON_INTERPRET": str(int(where == "cpu"))}
        subprocess.run([sys.executable, __file__, path, out, where, str(count)], check=True, env=environment)
        outcomes[where] = torch.load(out)
    found = []
    for number, (kernel, interpreted, compiled) in enumerate(zip(kernels, outcomes["cpu"], outcomes["cuda"])):
        found += [f"kernel{number} {line}" for line in differences(number, *kernel, interpreted, compiled)]
    assert not found, "\n".join(found)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="this process compiles")
def test_random_kernels_run_in_the_interpreter(tmp_path):
    path, out = tmp_path / "kernels.py", tmp_path / "out.pt"
    path.write_text(write(2)[0])
    run(path, out, "cpu", 2)
    assert len(torch.load(out)) == 2


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))
    run(*sys.argv[1:4], int(sys.argv[4]))
