"""The metadata is in setup.cfg; here only what it cannot say: two files that belong beside the package."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

STARTUP_FILES = ("sb3_td3x.pth", "sb3_td3x.start")


class BuildPy(build_py):
    """Put the start-up files into the root of the wheel, from where they land in site-packages."""

    def run(self) -> None:
        super().run()
        # An editable wheel takes nothing from `build_lib`; what is written to `install_lib` becomes part of it
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        for name in STARTUP_FILES:
            self.copy_file(name, folder)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else outputs + [str(Path(self.build_lib, name)) for name in STARTUP_FILES]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *STARTUP_FILES]


setup(cmdclass={"build_py": BuildPy})
