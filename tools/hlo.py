"""Reads XLA's optimized programs: which kernels each loop runs, and which of them only move bytes."""

import collections
import dataclasses
import math
import re
import zlib

from jgg.core.program_memory import Memory, planned_memory

_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%(\S+) = (.*)$")
# What launches nothing.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_FREE |= {"add-dependency", "opt-barrier", "async-update"}
# What a fusion does, by the name that XLA gives it. All but "other" only move bytes.
_KINDS = {
    "slice into a stack": r"dynamic[_-]update[_-]slice",
    "slice": r"^(?!dynamic_slice_fusion).*slice",  # that one hands its custom call slices, and is none itself
    "fill": r"^(loop|input|wrapped)_broadcast(_fusion)?\b",
    "copy": r"copy",
    "transpose": r"transpose",
    "convert": r"^(loop|input|wrapped)_convert(_fusion)?\b",
    "concatenate, pad": r"concatenate|_pad",
    "other": r"",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction that runs by itself: a kernel, a copy or a collective."""

    name: str
    kind: str  # one of _KINDS, or "call"
    nbytes: int  # of its results, or of what it writes into a larger array
    op_name: str  # where it comes from
    instruction: str = ""  # its name in the program


@dataclasses.dataclass
class Loop:
    """A loop of the program, or the rest of it, and what one pass runs; `passes` are those of a whole step.

    `lines` are all instructions in the order in which they start, also those that launch nothing. For an asynchronous
    one, that is the instruction which it starts, by the name of the start.
    """

    name: str
    passes: int
    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)


def loops_of(text: str) -> list[Loop]:
    """The program without its loops, then these, outer ones first."""
    return _Program(text).loops


def report(compiled, top: int) -> str:
    """The memory of a compiled program, and of each of its loops the kernels, the largest of each kind."""
    lines = [_memory(planned_memory(compiled))]
    for loop in loops_of(compiled.as_text()):
        lines += ["", f"{loop.name}: {loop.passes} x {len(loop.kernels)} kernels"]
        calls = collections.Counter(kernel.name for kernel in loop.kernels if kernel.kind == "call")
        lines += [f"  {count} x {name}" for name, count in calls.most_common()]
        for kind in _KINDS:
            lines += _largest(kind, [kernel for kernel in loop.kernels if kernel.kind == kind], top)
    return "\n".join(lines)


def _memory(memory: Memory) -> str:
    sizes = {
        "arguments": memory.arguments,
        "results in other memory": memory.results,
        "temporary": memory.temporaries,
        "peak, all together": memory.total,
    }
    return "GiB: " + ", ".join(f"{size / 2**30:.2f} {name}" for name, size in sizes.items())


def _largest(kind: str, kernels: list[Kernel], top: int) -> list[str]:
    """Lines with those kernels that write most; those alike share a line."""
    if not kernels:
        return []
    alike = collections.defaultdict(list)
    for kernel in kernels:
        alike[kernel.nbytes, kernel.op_name].append(kernel.name)
    largest = sorted(alike.items(), key=lambda item: -item[0][0] * len(item[1]))[:top]
    total = sum(kernel.nbytes for kernel in kernels) / 2**20
    return [f"  {kind}: {len(kernels)} write {total:.1f} MiB"] + [
        f"    {len(names)} x {nbytes / 2**20:.2f} MiB {names[0]} {op_name[-100:]}"
        for (nbytes, op_name), names in largest
    ]


class _Program:
    """A program's text, and the loops found in it."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, list[str]] = {}  # the lines of each
        entry = ""
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                own = self._computations[header[1]] = []
                entry = header[1] if line.startswith("ENTRY") else entry
            elif _INSTRUCTION.match(line):
                own.append(line)
        self.loops = [Loop("outside loops", 1)]
        self._visit(entry, self.loops[0])

    def _visit(self, computation: str, loop: Loop) -> None:
        for line in self._computations[computation]:
            name, rest = _INSTRUCTION.match(line).groups()
            operation = _operation(rest)
            loop.lines.append(self._started(line, name, operation, rest))
            if operation == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
                inside = "" if loop is self.loops[0] else f" in {loop.name.split()[0]}"
                passes = loop.passes * (int(trips[1]) if trips else 1)
                self.loops.append(Loop(f"{name}{inside} ({_op_name(rest)})", passes))
                self._visit(re.search(r"body=%([\w.-]+)", rest)[1], self.loops[-1])
            elif operation in ("call", "conditional"):
                # all branches count, though one runs
                for called in re.findall(r"(?:to_apply|_computations?)=\{?%([^,}]+(?:, %[^,}]+)*)", rest):
                    for branch in called.split(", %"):
                        self._visit(branch, loop)
            elif operation not in _FREE and not operation.endswith("-done") and '"AllocateBuffer"' not in rest:
                loop.kernels.append(dataclasses.replace(self._kernel(name, operation, rest), instruction=name))

    def _started(self, line: str, name: str, operation: str, rest: str) -> str:
        inner = self._computations.get(_called(rest), []) if operation == "async-start" else []
        return f"  %{name} = {_INSTRUCTION.match(inner[-1])[2]}" if inner else line

    def _kernel(self, name: str, operation: str, rest: str) -> Kernel:
        inner = self._computations.get(_called(rest), [])
        if operation == "async-start":  # its fusion is in a computation of its own
            return self._kernel(*_named(inner[-1]))
        nbytes, op_name = _nbytes(_results(rest, operation)), _op_name(rest)
        # a custom call may stand in a fusion, which hands it slices of its operands
        call = next((line for line in (rest, *inner) if "custom_call_target=" in line), None)
        if call is not None and (operation == "custom-call" or " custom-call(" in call):
            return Kernel(_name_of_call(call), "call", nbytes, op_name)
        if "fusion" not in operation and "copy" not in operation:
            return Kernel(operation, "call", nbytes, op_name)
        if operation == "fusion-start":
            name = f"loop_{_called(rest).removeprefix('fused_')}"
        kind = next(kind for kind, pattern in _KINDS.items() if re.search(pattern, name))
        if kind == "slice into a stack":
            nbytes = _nbytes(_written(inner)) or nbytes
        return Kernel(name, kind, nbytes, op_name)


def _named(line: str) -> tuple[str, str, str]:
    """An instruction's name, operation, and what stands behind the name."""
    name, rest = _INSTRUCTION.match(line).groups()
    return name, _operation(rest), rest


def _split_type(rest: str) -> tuple[str, str]:
    """The type of the results, which may be a tuple of tuples, and what follows it."""
    depth = 0
    for place, sign in enumerate(rest):
        depth += (sign in "({") - (sign in ")}")
        if sign == " " and not depth:
            return rest[:place], rest[place + 1 :]
    return rest, ""


def _operation(rest: str) -> str:
    return _split_type(rest)[1].partition("(")[0]


def _results(rest: str, operation: str) -> str:
    """The type of what an instruction writes; the starts of asynchronous ones also return operands and a context."""
    own = _split_type(rest)[0]
    if operation == "copy-start":  # (result, operand, context)
        return _ARRAY.search(own)[0]
    # ((operands), result, context)
    return own[own.index(")") :].rpartition(",")[0] if own.startswith("((") else own


def _written(inner: list[str]) -> str:
    """The types of what a fusion writes into larger arrays."""
    types = {name: _split_type(rest)[0] for name, rest in (_INSTRUCTION.match(line).groups() for line in inner)}
    updates = re.findall(r" dynamic-update-slice\(%[\w.-]+, %([\w.-]+)", "\n".join(inner))
    return " ".join(types.get(name, "") for name in updates)


def _nbytes(types: str) -> int:
    """Bytes of the arrays in a type."""
    return sum(
        (int(bits) if bits else 8) * math.prod(int(size) for size in shape.split(",") if size) // 8
        for _, bits, shape in _ARRAY.findall(types)
    )


def _called(rest: str) -> str:
    called = re.search(r"(?:calls|to_apply)=%([\w.-]+)", rest)
    return called[1] if called else ""


def _op_name(rest: str) -> str:
    found = re.search(r'op_name="([^"]*)"', rest)
    return found[1] if found else ""


def _name_of_call(line: str) -> str:
    """The kernel that a custom call runs: Triton's by the name in its code."""
    target = re.search(r'custom_call_target="([^"]*)"', line)[1]
    code = re.search(r'opaque = "((?:[^"\\]|\\.)*)"', line)
    if "triton" not in target or not code:
        return target
    entry = re.search(rb"\.entry (\w+)", zlib.decompress(_unescaped(code[1])))
    return entry[1].decode() if entry else target


def _unescaped(text: str) -> bytes:
    """Bytes that XLA wrote as text: after a backslash come a letter, a sign or two hexadecimal digits."""
    letters = {"n": "\n", "t": "\t", "r": "\r"}

    def sign(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code, 16)) if len(code) == 2 else letters.get(code, code)

    return re.sub(r"\\([0-9A-F]{2}|.)", sign, text).encode("latin-1")
