"""The build hook: compiles the cubins that a wheel carries, or those of an editable install.

LATENTD_CUBINS chooses: unset or "all" for every architecture, a comma list (sm_90a,sm_80), or
"none". A wheel is compiled into a temporary folder and ships exactly the files that were compiled;
an editable install writes them into the tree. A source that does not compile ends the build.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))

from latentd_kernels import build, compiler, manifest

INSTALLED_AT = "latentd_kernels/cubin"


class CubinHook(BuildHookInterface[BuilderConfig]):
    """Found by hatchling, which makes one for each build."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """The compiler wheels, when something will be compiled and no nvcc is here."""
        if self.target_name != "wheel" or not self._archs():
            return []
        return list(build.needed_wheels())

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name what the wheel takes in."""
        if self.target_name != "wheel":
            return
        archs = self._archs()
        if not archs:
            self.app.display_info("LATENTD_CUBINS=none: no cubins are built, only the cpu backend")
            return
        if version == "editable":
            build.build(archs, jobs=_jobs(), report=self.app.display_info)
            build.remove_foreign(manifest.CUBIN_DIR)
            return
        self._temporary = tempfile.TemporaryDirectory(prefix="latentd-cubin-")
        folder = Path(self._temporary.name)
        build.seed(archs, manifest.CUBIN_DIR, folder)
        try:
            files = build.build(archs, folder, jobs=_jobs(), report=self.app.display_info)
        except compiler.BuildError:
            self._temporary.cleanup()
            raise
        for path in files:
            inside = path.relative_to(folder).as_posix()
            build_data["force_include"][str(path)] = f"{INSTALLED_AT}/{inside}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder; the wheel is written."""
        if hasattr(self, "_temporary"):
            self._temporary.cleanup()

    def _archs(self) -> tuple[str, ...]:
        return build.select(os.environ.get("LATENTD_CUBINS"))


def _jobs() -> int:
    return len(os.sched_getaffinity(0))
