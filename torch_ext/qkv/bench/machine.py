"""This machine: its name, and what it can do at best."""

import os
import platform

import torch

import qkv
from qkv.bench.threads import allowed
from qkv.env import cpu_model


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def describe(dtypes):
    """Threads that OpenMP binds to a CPU each count as that many cores once they have run."""
    return {
        "cpu": cpu_model(),
        "cores": len(allowed()),
        "threads": torch.get_num_threads(),
        "isa": qkv.active_isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "dtype": ", ".join(map(name_of, dtypes)),
        "qkv": qkv.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "load_average": os.getloadavg()[0],
    }


def rates(dtype):
    """At best, of all threads together: {"read_gbs": GB/s (1e9) from memory}, and for a dtype also
    {"gflops": in registers, "instruction": "FMA", "vdpbf16ps" or "tdpbf16ps", what our instruction
    set multiplies it with}."""
    threads = torch.get_num_threads()
    found = {"read_gbs": torch.ops.qkv._probe_read_bandwidth(threads)}
    if dtype:
        instruction, gflops = torch.ops.qkv._probe_peak(qkv.active_isa(), dtype, threads)
        found |= {"gflops": gflops, "instruction": instruction}
    return found


def line(described):
    """What describe() returns."""
    return (
        f"{described['cpu']}, {described['cores']} cores, {described['threads']} threads, "
        f"{described['dtype']}; qkv {described['qkv']} ({described['isa']}), "
        f"torch {described['torch']} ({described['torch_isa']})"
    )


def lines(described, peak):
    """The same, and a line of what rates() returns."""
    read = f"memory read {peak['read_gbs']:.1f} GB/s"
    if "gflops" in peak:
        read = f"{peak['instruction']} peak {peak['gflops']:.0f} GFLOP/s, {read}"
    return [line(described), read]
