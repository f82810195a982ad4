"""What the operator is held against, as the tests call it: qkv.testing, and torch's attention."""

import doctest
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import qkv
from qkv import testing

INF = float("inf")
HALVES = (torch.bfloat16, torch.float16)
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}

# torch.compile's. Inductor compiles C++, for seconds: the quick layer has few tests with it. What
# it compiles includes Python.h, which Debian has in a package of its own.
needs_compiler = pytest.mark.skipif(
    not shutil.which("g++") or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="torch.compile needs g++ and Python.h (Debian: g++, python3-dev)",
)
COMPILERS = ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.long])]

# Of results of about 1, computed in other orders; halves are rounded at the end.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def dtypes_of(*names):
    """Parametrizes a test's `dtype`."""
    return pytest.mark.parametrize("dtype", [DTYPES[n] for n in names], ids=names)


def compute_type(dtype):
    """What is computed in; the lse's dtype."""
    return torch.float32 if dtype in HALVES else dtype


def attend(query, key, value, *args, **options):
    """(output, lse) as torch's math path computes them: in the inputs' dtype, half precision in
    f32 with the output rounded at the end. In f64 that is the truth."""
    dtype = compute_type(query.dtype)
    output, lse = testing.attention(
        query, key, value, *args, **options, dtype=dtype, return_lse=True
    )
    return output.to(query.dtype), lse


def reference(query, key, value, **options):
    """attend() in f64."""
    return testing.attention(query, key, value, **options, return_lse=True)


# What the forward operator wants to be told, though there is nothing to say.
NO_OPTIONS = dict.fromkeys(
    ("attn_mask", "bias", "spans", "alibi_slopes", "sinks", "dropout_seed", "cu_seq_q", "cu_seq_k",
     "seqused_k", "scale", "window_size")
) | {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False, "softcap": 0.0}  # fmt: skip


def fused(query, key, value, **options):
    """attend() by the operator, with the same keywords; dropout_seed instead of a drawn one."""
    if options.get("dropout_seed") is not None:
        options["dropout_seed"] = torch.tensor([options["dropout_seed"]])
    return torch.ops.qkv.attention_forward(query, key, value, **(NO_OPTIONS | options))


def merge_masks(L, S, attn_mask, is_causal):
    """One mask for both: torch's math path refuses the two together."""
    if attn_mask is None or not is_causal:
        return attn_mask, is_causal
    causal = testing.visible(L, S, is_causal)
    if attn_mask.dtype == torch.bool:
        return attn_mask & causal, False
    return attn_mask.masked_fill(~causal, -INF), False


def sdpa(query, key, value, attn_mask=None, is_causal=False, **options):
    """torch's attention, by whichever path torch takes (see torch.nn.attention.sdpa_kernel)."""
    kv_heads = -3 if options.get("enable_gqa") else -2
    batch = torch.broadcast_shapes(*(x.shape[:kv_heads] for x in (query, key, value)))
    # torch gets the output's shape wrong if only the value, or only the mask, has some dimension
    query, key, value = (x.expand(*batch, *x.shape[kv_heads:]) for x in (query, key, value))
    attn_mask, is_causal = merge_masks(query.size(-2), key.size(-2), attn_mask, is_causal)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options
    )


SDPA_OPTIONS = {"attn_mask", "is_causal", "scale", "enable_gqa"}


def unfused(query, key, value, **options):
    """(output, lse) as torch gives them: by its own attention if it can, else step by step."""
    output, lse = attend(query, key, value, **options)
    if options.keys() <= SDPA_OPTIONS:
        output = sdpa(query, key, value, **options)
    return output, lse


def in_own_dtype(query, key, value, **options):
    """(output, lse) of 4-D inputs as torch gives them without widening halves: the output by its
    fused kernel, which takes a mask of four dimensions only; what that has no argument for, step by
    step, every step rounded to the inputs' dtype."""
    output, lse = testing.attention(
        query, key, value, **options, dtype=query.dtype, return_lse=True
    )
    if options.keys() <= SDPA_OPTIONS:
        if (mask := options.get("attn_mask")) is not None:
            options["attn_mask"] = mask.expand(*query.shape[:-1], key.size(-2))
        output = sdpa(query, key, value, **options)
    return output, lse


def rounds_factors(dtype):
    """Whether the operator multiplies this dtype as it is: weights are rounded to it, too."""
    pairs = "bf16" in qkv.active_isa() or "amx" in qkv.active_isa()
    return dtype == torch.bfloat16 and pairs and qkv.active_half_products() == "native"


def as_torch(dtype):
    """What the operator must be as accurate as: torch with the same factors. (output, lse)."""
    return in_own_dtype if rounds_factors(dtype) else unfused


def products(call, name="mkldnn::_linear_pointwise"):
    """How many oneDNN makes, or the operator of this name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.name == name for event in profile.events())


def run_python(code, timeout=120, env=(), cwd=None):
    """stdout of `python -c code` in a fresh process, with `env` added to what it inherits, less
    what conftest.py sets for the tests themselves; fails with its stderr."""
    env = {**os.environ, **dict(env)}
    env.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, env=env,
        cwd=cwd,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def attempt(*command, **options):
    """How the command ended. Programs that pip installed next to this Python, such as cmake, are
    found first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options["env"] = {**os.environ, "PATH": path, **options.get("env", {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)


def fake_torch(folder, minor):
    """A folder that has as much of a torch as says its version."""
    header = folder / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), [*minor.split("."), "1"], strict=True)
    header.write_text("".join(f"#define TORCH_VERSION_{name} {n}\n" for name, n in numbers))
    return folder


def assert_example_runs(thing):
    """The example in the docstring of a function or a class gives what it says."""
    names = {"torch": torch, "qkv": qkv}
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(thing, globs=names, module=False)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
