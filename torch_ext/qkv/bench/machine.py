"""This machine: its name, what it can do at best, and how torch is held to the same."""

import os
import platform
from pathlib import Path

import torch

import qkv

# So that --isa compares like with like. Read when torch is loaded, not later.
CONFINED = {
    "avx512": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "generic": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}


def environment_for(isa):
    """The environment variables under which qkv and torch both use `isa`, and no more."""
    return {"QKV_ISA": isa, **CONFINED[isa]}


def cpu_model():
    """As the system names it: the model name of /proc/cpuinfo, where there is one."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe(dtype):
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "isa": qkv.active_isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "dtype": str(dtype).removeprefix("torch."),
        "qkv": qkv.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "load_average": os.getloadavg()[0],
    }


def fma_peak(dtype):
    """GFLOP/s of all threads together, registers only."""
    threads = torch.get_num_threads()
    return torch.ops.qkv._probe_fma_gflops(qkv.active_isa(), dtype, threads)


def read_bandwidth():
    """GB/s (1e9) of all threads together, from memory."""
    return torch.ops.qkv._probe_read_bandwidth(torch.get_num_threads())
