"""A stand-in for nvcc: fast, deterministic, and able to fail. Run as a program by the build tests.

It understands the command line of `latentd_kernels.compiler`, writes an image made of the
architecture and the source, and prints what ptxas would say of each entry point.
"""

import re
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    if "--version" in arguments:
        print("Cuda compilation tools, release 13.0, V13.0.88")
        return 0
    source, out = Path(arguments[-1]), Path(arguments[arguments.index("-o") + 1])
    arch = next(a.removeprefix("-arch=") for a in arguments if a.startswith("-arch="))
    text = source.read_text(encoding="utf-8")
    log = source.parent / "compiled.log"
    with log.open("a", encoding="utf-8") as lines:
        extra = [a for a in arguments if a == "-lineinfo" or a.startswith("-D")]
        lines.write(" ".join((arch, source.name, *extra)) + "\n")
    names = re.findall(r"__global__ void (\w+)", text)
    out.write_text(f"// {arch}\n" + "".join(f".visible .entry {n}(\n" for n in names) + text)
    if "#error" in text:  # as nvcc does when it is stopped: half a file and an exit code
        print(f"{source.name}(1): error: #error directive", file=sys.stderr)
        return 2
    for name in names:
        print(f"ptxas info    : Compiling entry function '{name}' for '{arch}'", file=sys.stderr)
        print(
            "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads", file=sys.stderr
        )
        print(
            "ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem", file=sys.stderr
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
