"""Prints the folder of a torch to build against: headers and the libraries that are linked.

    python release/fetch_torch.py 2.15.0                                       for this machine
    python release/fetch_torch.py 2.15                                         the newest of them
    python release/fetch_torch.py 2.15.0 --platform manylinux_2_28_aarch64     for another

It is the torch of this environment, if that has the version. Else torch's wheel is fetched from the
index that pip is set to, and unpacked into build/torches. It need not be a torch that this machine
can run, and nothing that torch depends on is fetched: a wheel with CUDA has 540 MB, and gigabytes
with what it depends on."""

import argparse
import importlib.metadata
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

TORCHES = Path(__file__).resolve().parents[1] / "build" / "torches"
LINKED = ("torch/include/", "torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "torch/lib/libgomp")
NOT_FOR_CPUS = ("cuda", "nvshmem")
# A wheel of torch is for one Python, and its headers are the same in all. This may be any version
# of Python for which all torches that we build for have wheels.
SOME_PYTHON = "3.12"


def of_this_environment(version):
    try:
        found = importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None
    fits = f"{found}.".startswith(f"{version}.")
    return Path(sysconfig.get_path("platlib")) / "torch" if fits else None


def download(version, platform, folder):
    """Fetches the wheel of torch `version` into `folder`, and returns its path."""
    version += ".*" if version.count(".") == 1 else ""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", SOME_PYTHON]
    command += ["--platform", platform] if platform else []
    subprocess.check_call([*command, "--dest", folder, f"torch=={version}"], stdout=sys.stderr)
    (wheel,) = folder.glob("torch-*.whl")
    return wheel


def of_wheel(version, platform, all_libraries):
    def wanted(name):
        if all_libraries and name.startswith("torch/lib/"):
            return not any(word in name for word in NOT_FOR_CPUS)
        return name.startswith(LINKED)

    folder = TORCHES / "-".join(filter(None, [version, platform, "all" if all_libraries else ""]))
    complete = folder / "complete"
    if not complete.exists():
        wheel = download(version, platform, folder)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, filter(wanted, archive.namelist()))
        wheel.unlink()
        complete.touch()
    return folder / "torch"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version")
    parser.add_argument("--platform", help="as in the wheel's name; this machine's if not given")
    parser.add_argument(
        "--all-libraries", action="store_true", help="also those that programs need to run"
    )
    options = parser.parse_args()
    torch = None if options.platform else of_this_environment(options.version)
    print(torch or of_wheel(options.version, options.platform, options.all_libraries))


if __name__ == "__main__":
    main()
