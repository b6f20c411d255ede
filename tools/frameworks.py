"""Installs a framework as docs/integrations.md says, together with this checkout, and runs its tests.

    python -m tools.frameworks maxtext --folder .frameworks

It runs the page's lines unchanged, except that it installs this checkout, with what tests need, instead of jgg from
GitHub. The environment stays in the folder. Tests are in tests/frameworks. Nothing needs a GPU.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECTIONS = {"levanter": "Levanter and haliax", "maxtext": "MaxText", "tunix": "tunix"}
WITHOUT_LINES = {"qwix": "pip install {jgg} qwix==0.1.8", "trl": "pip install {jgg}\npip install --no-deps trl"}
NAMES = sorted(SECTIONS | WITHOUT_LINES)
_JGG = re.compile(r"'jgg\[[\w,]+\] @ git\+https://[^']+'")
# eight devices, and programs that are compiled quickly
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


def lines_of(name: str) -> str:
    """The shell lines that install a framework together with this checkout."""
    jgg = f"-e '{ROOT}[dev]'"
    if name in WITHOUT_LINES:
        return WITHOUT_LINES[name].format(jgg=jgg)
    text = (ROOT / "docs/integrations.md").read_text()
    body = text.partition(f"\n## {SECTIONS[name]}\n")[2].partition("\n## ")[0]
    block = re.findall(r"^```sh\n(.*?)^```", body, re.DOTALL | re.MULTILINE)[0]
    lines, count = _JGG.subn(lambda _: jgg, block)
    if count != 1:
        raise SystemExit(f"the first lines of {SECTIONS[name]} in docs/integrations.md must install jgg once: {block}")
    return lines


def install(name: str, folder: Path) -> Path:
    """Makes an environment and returns its Python."""
    environment = folder / name
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # Python compiles what it imports, so pip need not; "no" is how pip wants that option said by its variable
    options = {"cwd": folder, "env": {**os.environ, "PATH": path, "PIP_NO_COMPILE": "no"}, "check": True}
    subprocess.run(["bash", "-exc", lines_of(name)], **options)
    # without a GPU this one writes a traceback whenever JAX starts
    subprocess.run(["bash", "-exc", "pip uninstall -qq -y jax-cuda12-pjrt"], **options)
    for packages in environment.glob("lib/python*/site-packages"):
        shutil.rmtree(packages / "tests", ignore_errors=True)  # draccus installs its own, before those of jgg
    return environment / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--folder", type=Path, required=True, help="for the environments")
    parser.add_argument("--no-tests", action="store_true", help="install only")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    python = install(options.name, folder)
    if not options.no_tests:
        command = [python, "-m", "pytest", "-q", "-rs", "-m", "not gpu", f"tests/frameworks/test_{options.name}.py"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
        sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    main()
