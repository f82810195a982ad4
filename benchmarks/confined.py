"""--isa: qkv and torch held to one instruction set."""

import os
import sys

import qkv

# So that --isa compares like with like. Read when torch is loaded, not later.
CONFINED = {
    "amx": {},
    "avx512bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "neon": {"ATEN_CPU_CAPABILITY": "default"},
    "generic": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}


def environment_for(isa):
    """The environment variables under which qkv and torch both use `isa`, and no more."""
    return {"QKV_ISA": isa, **CONFINED[isa]}


def confine(parser, isa, argv):
    """Holds qkv and torch to `isa`, or to what QKV_ISA says. torch looks at its environment only
    while it is loaded, so this process starts once more if that was not what is asked for."""
    isa = isa or os.environ.get("QKV_ISA")
    if not isa:
        return
    if isa not in qkv.supported_isas():
        expected = ", ".join(qkv.supported_isas())
        parser.error(f"--isa: this CPU cannot run '{isa}', expected one of: {expected}")
    wanted = environment_for(isa)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        command = [sys.executable, "-m", "benchmarks", *argv]
        os.execve(sys.executable, command, os.environ | wanted)
