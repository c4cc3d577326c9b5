"""Test the compiled pass for arm64 by emulation: python tools/arm64.py [arguments of pytest]

The library is cross-compiled, and every call of it in the tests is carried out by QEMU: the memory that a call refers
to is sent there, and what changed of it comes back. Without bf16's instruction, and where no function of the C library
is called, each result of a pass or product is also compared with that of the library of this x86-64 machine with AVX2:
it is to be the same bit for bit. Needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu,
libc6-dev-arm64-cross and qemu-user).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from truedraft.runtime import native
from truedraft.runtime.native import Op, OpKind, PassArguments

ROOT = Path(__file__).resolve().parents[1]
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FUNCTIONS = (
    "pass", "linear", "panels", "multiply", "choose", "layout", "takes_blocks", "rows", "pack_blocks", "attends_alone",
)  # fmt: skip
TESTS = (
    "tests/test_kernels.py", "tests/test_linears.py", "tests/test_runtime.py", "tests/test_recurrent.py",
    "tests/test_packed.py", "tests/test_quantised_checkpoints.py",
)  # fmt: skip
POINTERS = [name for name, kind in Op._fields_ if kind is ctypes.c_void_p]
ARGUMENTS, LEVELS, LEAST = 6, (2, 7), 2  # of `truedraft_choose` on arm64
PLAIN = (torch.Tensor, torch.nn.Parameter)
PER_NODE = ("slot", "position", "place", "base", "source_lengths", "source_slot", "parent")


def calls_library(op: Op) -> bool:
    """Whether an operation calls expf or log1pf of the C library."""
    from truedraft.runtime.program import SOFTPLUS  # not before pytest has its plugins

    return op.kind in (OpKind.XIELU, OpKind.RATES) or (op.kind == OpKind.GATE and op.mode == SOFTPLUS)


def missing() -> list[str]:
    """The programs that are needed and not installed."""
    return [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]


def built(folder: Path, compiler: str = COMPILER) -> Path:
    """The driver with the compiled pass in it."""
    program, source = folder / "arm64", ROOT / "src/truedraft/runtime/native/pass.c"
    flags = ("-O3", "-ffp-contract=off", "-fopenmp", "-static", "-Wno-deprecated-non-prototype")
    subprocess.run([compiler, *flags, str(ROOT / "tools/arm64.c"), str(source), "-o", str(program), "-lm"], check=True)
    return program


def integers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


class Image:
    """Memory that a call refers to, with offsets in it in place of addresses; the call's arguments come first."""

    def __init__(self) -> None:
        self.data, self.relocations = bytearray(8 * ARGUMENTS), list[int]()
        self.regions: list[tuple[int, int, int]] = []  # address, size, offset

    def add(self, address: int, size: int) -> int:
        """The offset of a piece of memory, which is copied unless it begins in one that was."""
        at = bisect_right(self.regions, (address, sys.maxsize, 0)) - 1
        if at >= 0 and address < sum(self.regions[at][:2]):
            return self.regions[at][2] + address - self.regions[at][0]
        offset = len(self.data)
        self.data += ctypes.string_at(address, size) + bytes(-size % 64 + 64)
        insort(self.regions, (address, size, offset))
        return offset

    def point(self, at: int, address: int | None, size: int) -> int:
        """Write a pointer at an offset; returns the offset that it points to."""
        to = self.add(address, size) if address else 0
        struct.pack_into("q", self.data, at, to)
        self.relocations += [at] if address else []
        return to


class Emulated:
    """The library, carried out by QEMU; with `host`, passes are compared with those of that library."""

    def __init__(self, program: Path, host: Any, most: int):
        self._process = subprocess.Popen(
            [EMULATOR, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=dict(os.environ, OMP_WAIT_POLICY="passive"),
        )  # fmt: skip
        self._one_at_a_time = threading.Lock()  # weights are packed by several threads
        self._host, self._most, self.compared, self.products = host, most, 0, 0
        self._tensors: dict[bytes, list[tuple[int, int]]] = {}  # those that operations refer to
        self.truedraft_choose(max(LEVELS))

    def _sent(self, name: str, arguments: Sequence[int], image: Image) -> tuple[int, bytes]:
        """The result of a call, and the memory after it."""
        for i, argument in enumerate(arguments):
            if 8 * i not in image.relocations:
                struct.pack_into("q", image.data, 8 * i, argument)
        given, taken, count = self._process.stdin, self._process.stdout, len(image.relocations)
        assert given is not None and taken is not None
        with self._one_at_a_time:
            given.write(struct.pack(f"{3 + count}q", FUNCTIONS.index(name), len(image.data), count, *image.relocations))
            given.write(image.data)
            given.flush()
            answer = taken.read(8 + len(image.data))
        assert len(answer) == 8 + len(image.data), f"the emulated {name} ended with {self._process.wait()}"
        return struct.unpack_from("q", answer)[0], answer[8:]

    def _called(self, name: str, arguments: Sequence[int], image: Image) -> int:
        """Carry out a call, and write back what it changed."""
        result, memory = self._sent(name, arguments, image)
        for address, size, at in image.regions:
            if memory[at : at + size] != image.data[at : at + size]:
                ctypes.memmove(address, memory[at : at + size], size)
        return result

    def _operations(self, image: Image, address: int, count: int) -> None:
        """The first argument: operations, with the tensors that they refer to."""
        size = ctypes.sizeof(Op)
        bytes_ = ctypes.string_at(address, count * size)
        ops, at = (Op * count).from_buffer_copy(bytes_), image.point(0, address, count * size)
        pointers = [
            (at + i * size + getattr(Op, n).offset, getattr(op, n)) for i, op in enumerate(ops) for n in POINTERS
        ]
        if bytes_ not in self._tensors:
            found = storages()
            self._tensors[bytes_] = [found[bisect_right(found, (p, sys.maxsize)) - 1] for _, p in pointers if p]
        for tensor in self._tensors[bytes_]:
            image.add(*tensor)
        for field, pointer in pointers:
            image.point(field, pointer, 1)

    def truedraft_pass(self, ops: Any, count: int, given: PassArguments, share: int, threads: int) -> int:
        image, sizes = Image(), dict.fromkeys(PER_NODE, given.nodes)
        self._operations(image, ctypes.addressof(ops), count)
        sizes |= dict(token=1 if given.embeds else given.nodes, extra_from=given.nodes + 1, extra=given.extras)
        sizes |= dict(extra_position=given.extras, gather=given.tail, group_from=given.groups + 1)
        sizes |= dict(row_from=given.rows + 1, settled=given.rows, path_from=given.rows + 1)
        sizes |= dict(room=given.buffers, buffer=given.buffers, stride=given.buffers)
        sizes |= dict(
            embeds=given.nodes * ops[0].inner // 2,
            path=integers(given.path_from, given.rows + 1)[-1] if given.rows else 0,
        )
        addresses, room = integers(given.buffer, given.buffers), integers(given.room, given.buffers)
        buffers = image.add(given.buffer, 8 * given.buffers)
        at = image.point(16, ctypes.addressof(given), ctypes.sizeof(given))
        for name, size in sizes.items():
            image.point(at + getattr(PassArguments, name).offset, getattr(given, name), 8 * size)
        rooms = {address: 4 * numbers for address, numbers in zip(addresses, room, strict=True) if address}
        for address in sorted(rooms):
            image.add(address, rooms[address])
        for i, address in enumerate(addresses):
            image.point(buffers + 8 * i, address, 1)
        arguments = (0, count, 0, share, threads)
        if self.level != LEAST or any(map(calls_library, ops[:count])):
            return self._called("pass", arguments, image)
        result, memory = self._sent("pass", arguments, image)
        self._host.truedraft_choose(LEAST)
        assert result == self._host.truedraft_pass(ops, count, given, share, threads)
        inside = set(image.relocations)
        for address, size, at in image.regions:
            if inside.isdisjoint(range(at, at + size)):  # no pointers, which differ
                assert same(ctypes.string_at(address, size), memory[at : at + size]), "other bits than with AVX2"
        self.compared += 1
        return result

    def truedraft_linear(self, op: Op, x: int, nodes: int, y: int, threads: int) -> int:
        image = Image()
        self._operations(image, ctypes.addressof(op), 1)
        image.point(8, x, 4 * nodes * op.inner)
        image.point(24, y, 4 * nodes * op.out)
        result = self._called("linear", (0, 0, nodes, 0, threads), image)
        if self.level == LEAST and not result:
            theirs = ctypes.create_string_buffer(4 * nodes * op.out)
            self._host.truedraft_choose(LEAST)
            assert self._host.truedraft_linear(op, x, nodes, ctypes.addressof(theirs), threads) == 0
            assert same(ctypes.string_at(y, len(theirs)), theirs.raw), "another product than with AVX2"
            self.products += 1
        return result

    def truedraft_panels(self, form: int, rows: int, out: int, width: int, panels: int, threads: int) -> int:
        return self._reordered("panels", form, rows, out, width, panels, threads)

    def truedraft_rows(self, form: int, panels: int, out: int, width: int, rows: int, threads: int) -> int:
        return self._reordered("rows", form, panels, out, width, rows, threads)

    def _reordered(self, name: str, form: int, given: int, out: int, width: int, made: int, threads: int) -> int:
        return self._called(name, (form, 0, out, width, 0, threads), self._from_to(given, made))

    def _from_to(self, given: int, made: int) -> Image:
        """The second argument, which is read, and the fifth, which is written; both are within tensors."""
        image = Image()
        for at, address in (8, given), (32, made):
            image.add(*next(tensor for tensor in storages() if tensor[0] <= address < sum(tensor)))
            image.point(at, address, 1)
        return image

    def truedraft_pack_blocks(self, kind: int, given: int, rows: int, columns: int, packed: int) -> int:
        return self._called("pack_blocks", (kind, 0, rows, columns, 0), self._from_to(given, packed))

    def truedraft_multiply(self, form: int, steps: int, threads: int) -> int:
        return self._called("multiply", (form, steps, threads), Image())

    def truedraft_layout(self) -> int:
        return self._called("layout", (), Image())

    def truedraft_takes_blocks(self) -> int:
        return self._called("takes_blocks", (), Image())

    def truedraft_attends_alone(self) -> int:
        return self._called("attends_alone", (), Image())

    def truedraft_choose(self, wanted: int) -> int:
        self.level = self._called("choose", (min(wanted, self._most),), Image())
        return self.level

    def close(self) -> None:
        self._process.communicate()


def same(ours: bytes, theirs: bytes) -> bool:
    """Whether all bits are the same, but those of fp32 NaN, whose sign is the processor's own."""
    kept = len(ours) // 4 * 4
    a, b = (np.frombuffer(memory[:kept], np.uint32) for memory in (ours, theirs))
    other = a != b
    nan = (a[other] & 0x7FFFFFFF > 0x7F800000) & (b[other] & 0x7FFFFFFF > 0x7F800000)
    return bool(nan.all()) and ours[kept:] == theirs[kept:]


def storages() -> list[tuple[int, int]]:
    """Address and size of the memory of all tensors, by address."""
    tensors = [
        thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu"
    ]
    found = (tensor.untyped_storage() for tensor in tensors if type(tensor) in PLAIN)
    return sorted({(storage.data_ptr(), storage.nbytes()) for storage in found})


class Prepared:
    """Leaves what the imports made out of the searches for tensors, which are faster then; and has the passes of chains
    and trees made one at a time, since those that one call makes rank logits by a function of this machine."""

    @staticmethod
    def pytest_collection_finish() -> None:
        from truedraft.runtime.chaining import ExtendingPass  # not before pytest has its plugins

        ExtendingPass.greedy_chains = False
        gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without bf16's instruction, as before Armv8.6")
    options, others = parser.parse_known_args()
    if absent := missing():
        sys.exit(f"there is no {' and no '.join(absent)} here")
    host = native.library()
    if host is None:
        sys.exit("the compiled pass was not built on this machine")
    with tempfile.TemporaryDirectory(prefix="truedraft-arm64-") as folder:
        emulated = Emulated(built(Path(folder)), host, LEVELS[not options.plain])
        native.library = lambda: emulated  # type: ignore[assignment]
        assert emulated.truedraft_layout() == host.truedraft_layout()
        failed = pytest.main(others or [str(ROOT / test) for test in TESTS], [Prepared()])
        emulated.close()
    compared = f"{emulated.compared} passes and {emulated.products} products"
    print(f"\n{compared} had the same bits as with AVX2 on this machine")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
