"""Writes the bill of materials of each wheel beside it, in CycloneDX's format.

    python release/sbom.py dist/qkv-0.1.0-py3-none-manylinux_2_27_x86_64.whl

A wheel of qkv holds nothing of others: the bill is the wheel, and what its metadata requires."""

import hashlib
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def component(name, **fields):
    url = PackageURL("pypi", name=name, version=fields.get("version"))
    return Component(name=name, purl=url, bom_ref=str(url), type=ComponentType.LIBRARY, **fields)


def bill_of(wheel):
    """The text of the bill."""
    metadata = metadata_of(wheel)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    root = component(
        metadata["Name"],
        version=metadata["Version"],
        description=metadata["Summary"],
        licenses=[LicenseFactory().make_from_string(metadata["License-Expression"])],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)],
    )
    requirements = map(Requirement, metadata.get_all("Requires-Dist", []))
    required = [
        component(x.name, description=f"required as {x}") for x in requirements if not x.marker
    ]
    bill = Bom(components=required)
    bill.metadata.component = root
    bill.register_dependency(root, required)
    return JsonV1Dot6(bill).output_as_string(indent=2)


def main(wheels):
    for wheel in map(Path, wheels):
        bill = bill_of(wheel)
        if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill):
            sys.exit(f"{wheel}: the bill of materials is not CycloneDX: {error}")
        wheel.with_suffix(".cdx.json").write_text(bill)


if __name__ == "__main__":
    main(sys.argv[1:])
