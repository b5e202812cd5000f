"""One architecture's cubins while they are built: what is kept, what is compiled, the manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from latentd_kernels import manifest
from latentd_kernels.compiler import BuildError, Compiler, inputs_digest
from latentd_kernels.manifest import Image, Kernel, Manifest, ManifestError


class Target:
    """One architecture's folder under construction; `compile` may run in several threads."""

    def __init__(self, arch: str, folder: Path, sources: Path, compiler: Compiler) -> None:
        """Make the folder if need be and read the manifest that is there, whatever its age."""
        self.arch = arch
        self.num_compiled = 0
        self.num_kept = 0
        self._folder = folder
        self._sources = sources
        self._compiler = compiler
        self._hashes = manifest.source_hashes(sources)
        self._images: dict[str, Image] = {}
        self._kernels: dict[str, Kernel] = {}
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._old = manifest.read(folder, arch)
        except ManifestError:
            self._old = Manifest(arch, {}, {}, {})

    def sources(self) -> list[str]:
        """Files to compile, by their paths in the sources."""
        return [name for name in self._hashes if manifest.compiled_for(name, self.arch)]

    def compile(self, source_name: str) -> tuple[str, Image, dict[str, Kernel]]:
        """Compile one source, or keep its image when it is current."""
        source = self._sources / source_name
        name = source_name.removesuffix(".cu").replace("/", "_")
        name += ".ptx" if self.arch.startswith("compute_") else ".cubin"
        inputs = inputs_digest(source, self.arch)
        old, path = self._old.images.get(name), self._folder / name
        if (
            old is not None
            and (old.inputs, old.compiler) == (inputs, self._compiler.release)
            and path.is_file()
            and manifest.sha256(path) == old.sha256
        ):
            kept = {
                key: kernel for key, kernel in self._old.kernels.items() if kernel.image == name
            }
            return name, old, kept
        data, kernels = self._compiler.compile(source, self.arch, name)
        manifest.write_atomically(path, data)
        digest = hashlib.sha256(data).hexdigest()
        return name, Image(source_name, digest, inputs, self._compiler.release), kernels

    def add(self, name: str, image: Image, kernels: dict[str, Kernel]) -> None:
        """Take in one image. Raises BuildError for an entry point that another image has too."""
        for kernel in kernels.keys() & self._kernels.keys():
            other = self._kernels[kernel].image
            raise BuildError(f"{self.arch}: {kernel} is in {name} and in {other}")
        if image is self._old.images.get(name):
            self.num_kept += 1
        else:
            self.num_compiled += 1
        self._images[name] = image
        self._kernels.update(kernels)

    def finish(self) -> None:
        """Write the manifest and remove whatever it does not name."""
        images, kernels = dict(sorted(self._images.items())), dict(sorted(self._kernels.items()))
        Manifest(self.arch, self._hashes, images, kernels).write(self._folder)
        for path in set(self._folder.iterdir()) - set(self.files()):
            if not path.name.endswith(".part"):  # of another build that is running now
                path.unlink()

    def files(self) -> list[Path]:
        """The manifest and the images it names."""
        return [self._folder / name for name in (manifest.FILE_NAME, *sorted(self._images))]

    def spilling(self) -> list[str]:
        """Entry points whose registers do not suffice: slower than they should be, not wrong."""
        return sorted(name for name, kernel in self._kernels.items() if kernel.spill_stores)
