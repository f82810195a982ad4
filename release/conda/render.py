"""Fills in the conda recipe for a source distribution, and renders it: into dist/conda/recipe.yaml.

python release/conda/render.py dist/qkv-0.1.0.tar.gz"""

import hashlib
import re
import sys
from pathlib import Path

from rattler_build import PlatformConfig, RenderConfig, Stage0Recipe, VariantConfig

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = ("linux-64", "linux-aarch64")
# What conda-forge sets for all recipes, as far as this one asks for it, with versions as it has.
VARIANTS = {
    "c_stdlib": ["sysroot"],
    "c_stdlib_version": ["2.28"],
    "cxx_compiler": ["gxx"],
    "cxx_compiler_version": ["14"],
    "python": ["3.12.*"],
}


def filled_in(sdist):
    """The text of the recipe."""
    repository = re.search('^repository = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    if not repository:
        print("pyproject.toml names no repository, and so the conda recipe none that exists")
    values = {
        "VERSION": re.search(r"-([^-]+)\.tar\.gz$", sdist.name)[1],
        "SHA256": hashlib.sha256(sdist.read_bytes()).hexdigest(),
        "REPOSITORY": repository or "https://example.org/qkv",
    }
    template = (ROOT / "release" / "conda" / "recipe.yaml").read_text()
    return re.sub("@([A-Z0-9]+)@", lambda found: values[found[1]], template)


def main(sdist):
    text = filled_in(sdist)
    target = sdist.parent / "conda" / "recipe.yaml"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text)
    for platform in PLATFORMS:
        config = RenderConfig(PlatformConfig(target_platform=platform))
        for variant in Stage0Recipe.from_file(target).render(VariantConfig(VARIANTS), config):
            package = variant.recipe.package
            print(f"{target}: {package.name} {package.version} for {platform}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
