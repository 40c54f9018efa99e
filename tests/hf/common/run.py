"""transformers' own tests of every model, over the models of this package.

    python tests/hf/common/run.py [--source CHECKOUT] [options of pytest]

They are no part of the installed package, and not copied here. Without `--source` the source distribution of the version that is installed
is fetched through pip into .cache (once). It has `ModelTesterMixin`, but neither `GenerationTesterMixin` nor `ExportTesterMixin`: those
stand in folders that it leaves out, and run with a checkout of transformers at the tag of that version (`--source`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import transformers

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[2] / ".cache" / f"transformers-{transformers.__version__}"
LEFT_OUT = {
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}
"""What the tests import and the source distribution leaves out, empty."""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], check=True)


def fetched() -> Path:
    """The folder above `tests`, whole or not there."""
    if not CACHE.exists():
        making = CACHE.with_suffix(".part")
        shutil.rmtree(making, ignore_errors=True)
        name = f"transformers-{transformers.__version__}"
        pip("download", "--no-deps", "--no-binary", ":all:", f"transformers=={transformers.__version__}", "--dest", str(making))
        pip("install", "--no-deps", "--target", str(making), "parameterized")
        with tarfile.open(making / f"{name}.tar.gz") as archive:
            archive.extractall(making, [member for member in archive if member.name.startswith(f"{name}/tests/")], filter="data")
        (making / name / "tests").rename(making / "tests")
        (making / "tests" / "__init__.py").touch()
        for path, text in LEFT_OUT.items():
            (making / "tests" / path).parent.mkdir()
            (making / "tests" / path).write_text(text)
        making.rename(CACHE)
    return CACHE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkout of transformers, which must have tests/generation")
    options, others = parser.parse_known_args()
    source = options.source.resolve() if options.source else fetched()
    if not (source / "tests" / "test_modeling_common.py").exists():
        parser.error(f"--source must be a checkout of transformers, got {source}, without tests/test_modeling_common.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"}
    # The tests of another package may warn, and have marks of their own.
    settings = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", str(HERE / "models.py"), *settings, *others]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
