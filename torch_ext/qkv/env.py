"""What a report of a problem needs to say: `python -m qkv.env` prints it.

The machine, the libraries that were loaded, how many threads there are and where they may run, and
which of the doors are open: what computes attention with qkv that does not call it."""

import os
import platform
import sys
from pathlib import Path

import torch

import qkv
from qkv import _replace, _replace_flex
from qkv._library import library, version_of

# What changes results or speed, of qkv, OpenMP and torch.
_VARIABLES = ("QKV_", "OMP_", "GOMP_", "KMP_", "MKL_", "ATEN_CPU_CAPABILITY")
_INTEGRATED = ("transformers", "timm", "diffusers", "onnx")


def cpu_model() -> str:
    """As the system names it: the model name of /proc/cpuinfo, where there is one."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe() -> dict[str, str]:
    """Everything, by name. The two threads of a program that are on one core, and two OpenMP
    libraries in one process, are the usual reasons for a call that takes ten times too long."""
    cores = sorted(os.sched_getaffinity(0))
    binding = os.environ.get("OMP_PROC_BIND", "no")
    versions = (f"{name} {found}" for name in _INTEGRATED if (found := version_of(name)))
    variables = (f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES))
    return {
        "qkv": f"{qkv.__version__}, {library()}",
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "python": f"{platform.python_version()}, {platform.platform()}",
        "cpu": f"{cpu_model()}, {len(cores)} cores: {', '.join(map(str, cores))}",
        "instruction set": f"{qkv.active_isa()} of {', '.join(qkv.supported_isas())}",
        "half products": qkv.active_half_products(),
        "reproducible": str(qkv.is_reproducible()),
        "threads": f"{torch.get_num_threads()}, bound: {binding}",
        "OpenMP": ", ".join(_openmp()) or "unknown",
        "load": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "variables": " ".join(variables) or "none",
        "doors": ", ".join(_doors()) or "none open",
        "installed": ", ".join(versions) or f"none of {', '.join(_INTEGRATED)}",
    }


def _openmp() -> list[str]:
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in mapped}
    names = ("libgomp", "libiomp", "libomp")
    return sorted(file.strip() for file in files if Path(file).name.startswith(names))


def _doors() -> list[str]:
    masking = sys.modules.get("transformers.masking_utils")
    doors = {
        "replace_sdpa": _replace.active,
        "replace_flex": _replace_flex.active,
        'attn_implementation="qkv"': masking and "qkv" in masking.ALL_MASK_ATTENTION_FUNCTIONS,
    }
    return [door for door, is_open in doors.items() if is_open]


if __name__ == "__main__":
    for name, what in describe().items():
        print(f"{name + ':':<17}{what}")
