"""The shape of the code, kept by reading it: ranks point down, cores do no I/O, functions stay short."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANKS = {"filters": 0, "pipeline": 1, "backend": 2, "gateway": 3}
SANS_IO = ("filters", "pipeline")
# What a sans-I/O package must not import: sockets, clocks, the environment, threads, chance, logs.
FORBIDDEN = {
    *(
        "aiohttp",
        "asyncio",
        "concurrent",
        "ctypes",
        "fcntl",
        "glob",
        "http",
        "httpx",
        "io",
        "logging",
        "mmap",
    ),
    *("multiprocessing", "os", "pathlib", "random", "redis", "requests", "secrets", "select", "selectors"),
    *("shutil", "signal", "socket", "socketserver", "sqlite3", "ssl", "starlette", "subprocess"),
    *("tempfile", "threading", "time", "urllib", "uuid", "uvicorn", "uvloop", "websockets"),
}
STREAMS = {"sys.stdin", "sys.stdout", "sys.stderr", "sys.argv"}
MAX_FUNCTION_LINES = 40
MAX_MODULE_LINES = 320

MODULES = sorted(path for package in RANKS for path in (ROOT / package).rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each import, those inside functions too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno} is a relative import"
            yield node.lineno, node.module or ""


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def num_lines(function: Function) -> int:
    """From `def` to the end, without the docstring: the part that one has to hold in one's head."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_there_are_modules_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(RANKS)


# Each looks at all modules, and its failure names every fault: a test for each module would be 1,600 tests.


def test_imports_point_down() -> None:
    faults = []
    for path in MODULES:
        rank = RANKS[path.relative_to(ROOT).parts[0]]
        for line, module in imported(path):
            package = module.split(".")[0]
            if RANKS.get(package, -1) > rank or package in ("tests", "benchmarks"):
                faults.append(f"{name(path)}:{line} imports {module}")
    assert not faults


def test_a_core_does_no_io() -> None:
    faults = []
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] in SANS_IO:
            faults += [
                f"{name(path)}:{line} imports {module}"
                for line, module in imported(path)
                if module.split(".")[0] in FORBIDDEN
            ]
            faults += [
                f"{name(path)}:{node.lineno} has {ast.unparse(node)}"
                for node in ast.walk(tree_of(path))
                if isinstance(node, ast.expr | ast.stmt) and does_io(node)
            ]
    assert not faults


def does_io(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in STREAMS
    if isinstance(node, ast.Name):
        return node.id in ("open", "print", "input")
    return isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)


def test_modules_are_documented_and_short() -> None:
    assert not [name(path) for path in MODULES if not ast.get_docstring(tree_of(path))]
    sizes = {name(path): len(path.read_text().splitlines()) for path in MODULES}
    assert not {path: size for path, size in sizes.items() if size > MAX_MODULE_LINES}


def test_functions_are_short() -> None:
    assert not [
        f"{name(path)}: {each.name} has {num_lines(each)} lines"
        for path in MODULES
        for each in functions(path)
        if num_lines(each) > MAX_FUNCTION_LINES
    ]


def test_modules_are_not_named_for_nothing() -> None:
    empty = ("utils", "util", "helpers", "helper", "manager", "common", "misc", "base")
    assert not [name(path) for path in MODULES if path.stem in empty]
