"""Man pages and completion scripts for the wheel's `share`; all else stands in pyproject.toml."""

import sys
from collections import defaultdict
from pathlib import Path

import setuptools  # first: it brings distutils, which Python 3.12 no longer has

from distutils.command.install_data import install_data  # isort: skip

ROOT = Path(__file__).resolve().parent


class InstallData(install_data):
    """Makes the files from the table of commands, which needs click and pydantic alone."""

    def run(self) -> None:
        sys.path.insert(0, str(ROOT))
        from mlxstacks.cli import make_group
        from mlxstacks.cli.shell import shell_files

        made = Path(self.get_finalized_command("build").build_base) / "share"
        folders = defaultdict(list)
        for name, text in shell_files(make_group()).items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            folders[f"share/{Path(name).parent.as_posix()}"].append(str(path))
        self.data_files = list(folders.items())
        super().run()


# an entry, so that there is something to install
setuptools.setup(cmdclass={"install_data": InstallData}, data_files=[("share/man/man1", [])])
