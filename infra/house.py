"""Print how readable the code is, in numbers: ``make house``.

``python infra/house.py --worst 10`` lists the places behind each number. The numbers are a picture and no gate: the
exit code is always 0. Only the standard library is used, and the product is parsed, never imported.

Two numbers are not here because source text alone does not give them: how many frames lie between a command and a stage
(that needs a run under a tracer), and how many concepts a reader has to hold.
"""

import argparse
import ast
import json
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("flows", "stages", "hacrl_core")
# Importing one of these takes a good part of a second or more, so a function may import it when it is called.
HEAVY = frozenset({
    "accelerate", "datasets", "fastapi", "huggingface_hub", "latex2sympy2_extended", "math_verify", "matplotlib",
    "mlflow", "pandas", "peft", "playwright", "prefect", "pyarrow", "safetensors", "scipy", "sqlalchemy", "sympy",
    "tokenizers", "torch", "transformers", "triton", "uvicorn", "vllm",
})  # fmt: skip
LONG_FUNCTION = 50
LONG_FILE = 400
LONG_MARKDOWN_LINE = 200
# Files that say how a class of errors or a base class looks are not needed to understand a formula.
NOT_PART_OF_THE_LOSS = frozenset({"hacrl_core.errors", "hacrl_core.config.base", "hacrl_core.seeding"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One import statement's target inside or outside the project, and where it stands."""

    target: str
    line: int
    local: bool


@dataclass
class Module:
    """One parsed source file."""

    name: str
    path: Path
    tree: ast.Module
    lines: int
    imports: list[Import] = field(default_factory=list)

    @property
    def is_package(self) -> bool:
        """Whether this is an ``__init__.py``."""
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class Row:
    """One line of the table; ``places`` are what ``--worst`` lists, the worst first."""

    name: str
    now: str
    target: str = ""
    places: tuple[str, ...] = ()


def read_modules(root: Path) -> dict[str, Module]:
    """Parse every source file of the product below ``root``, by dotted name."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            modules[name] = Module(name, path, ast.parse(text), len(text.splitlines()))
    for module in modules.values():
        module.imports = list(find_imports(module, modules))
    return modules


def find_imports(module: Module, modules: dict[str, Module]) -> Iterator[Import]:
    """Yield what a module imports; imports for the type checker alone are left out because they never run."""

    def visit(node: ast.AST, local: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                yield from visit(child, local)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, local)
        elif isinstance(node, ast.ImportFrom):
            source = absolute_name(module, node)
            # `from package import module` names the module; `from module import name` names the module it comes from.
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield Import(full if full in modules else source, node.lineno, local)
        inside = local or isinstance(node, Function | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(module.tree, False)


def absolute_name(module: Module, node: ast.ImportFrom) -> str:
    """Return the dotted name that ``from … import`` reads from, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def import_graph(modules: dict[str, Module], with_local: bool = True) -> dict[str, set[str]]:
    """Return which of the project's modules each one imports."""
    return {
        name: {
            found.target
            for found in module.imports
            if found.target in modules and found.target != name and (with_local or not found.local)
        }
        for name, module in modules.items()
    }


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return ``start`` and everything it imports, directly or not."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(graph.get(name, ()))
    return seen


def shortest_path(graph: dict[str, set[str]], start: str, end: str) -> list[str]:
    """Return the modules from ``start`` to ``end``, each imported by the one before; empty when there is no way."""
    paths = [[start]]
    seen = {start}
    for path in paths:
        if path[-1] == end:
            return path
        following = sorted(graph.get(path[-1], set()) - seen)
        seen.update(following)
        paths.extend([*path, name] for name in following)
    return []


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or not."""
    reach = {name: reachable(graph, name) for name in graph}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def heavy_modules(modules: dict[str, Module]) -> set[str]:
    """Return the modules that bring in a heavy package when they are imported."""
    graph = import_graph(modules, with_local=False)
    direct = {
        name
        for name, module in modules.items()
        if any(not found.local and is_heavy_package(found.target) for found in module.imports)
    }
    return {name for name in modules if reachable(graph, name) & direct}


def is_heavy_package(target: str) -> bool:
    """Return whether an import names one of the heavy packages."""
    return target.split(".")[0] in HEAVY


def functions_of(module: Module) -> Iterator[tuple[str, Function, bool]]:
    """Yield every function with its qualified name and whether it is public: named so, and not inside another one."""

    def visit(node: ast.AST, prefix: str, public: bool) -> Iterator[tuple[str, Function, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                name = f"{prefix}{child.name}"
                is_public = public and not child.name.startswith("_")
                yield name, child, is_public
                yield from visit(child, f"{name}.", False)
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.", public)
            else:
                yield from visit(child, prefix, public)

    yield from visit(module.tree, "", True)


def size_rows(modules: dict[str, Module], root: Path) -> Iterator[Row]:
    """Yield the rows about counts and sizes of modules, files and functions."""
    files = [module for module in modules.values() if not module.is_package]
    total = sum(module.lines for module in modules.values())
    yield Row("product modules / lines", f"{len(files)} / {total}", "≤ 171 / ≤ 22300")
    yield size_row(
        "lines per file", [(module.lines, str(module.path.relative_to(root))) for module in files], LONG_FILE
    )
    functions = [
        (node.end_lineno - node.lineno + 1, f"{module.path.relative_to(root)}:{node.lineno} {name}")
        for module in modules.values()
        for name, node, _ in functions_of(module)
        if node.end_lineno is not None
    ]
    yield size_row("lines per function", functions, LONG_FUNCTION)


def size_row(name: str, sizes: Iterable[tuple[int, str]], limit: int) -> Row:
    """Return a row with the median, the maximum and how many are above the limit."""
    ordered = sorted(sizes, key=lambda item: -item[0])
    numbers = [size for size, _ in ordered] or [0]
    above = sum(size > limit for size in numbers)
    now = f"median {statistics.median(numbers):g}, max {numbers[0]}, {above} above {limit}"
    return Row(name, now, f"0 above {limit}", tuple(f"{size}  {place}" for size, place in ordered))


def flows_rows(modules: dict[str, Module], root: Path) -> Iterator[Row]:
    """Yield the rows about the layout of ``flows`` and about imports."""
    flows = {name: module for name, module in modules.items() if name.startswith("flows.") and not module.is_package}
    yield Row("flows: modules", str(len(flows)), "≤ 65")
    flat = sorted(name for name in flows if name.count(".") == 1)
    yield Row("flows: flat modules", str(len(flat)), "4", tuple(flat))
    graph = import_graph(modules)
    importers: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            importers[target].add(name)
    single = sorted(name for name in flows if len(importers[name]) == 1)
    places = tuple(f"{name} ← {next(iter(importers[name]))}" for name in single)
    yield Row("flows: modules with one importer", str(len(single)), "≤ 15", places)
    cycles = find_cycles(graph)
    yield Row("import cycles", str(len(cycles)), "0", tuple(" ⇄ ".join(cycle) for cycle in cycles))
    at_start = find_cycles(import_graph(modules, with_local=False))
    places = tuple(" ⇄ ".join(cycle) for cycle in at_start)
    yield Row("import cycles without local imports", str(len(at_start)), "0", places)
    yield from local_import_rows(modules, root)


def local_import_rows(modules: dict[str, Module], root: Path) -> Iterator[Row]:
    """Yield the rows about imports inside functions of ``flows``; one statement counts once."""
    heavy = heavy_modules(modules)
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name, module in modules.items():
        if name.split(".")[0] != "flows":
            continue
        statements: dict[int, list[str]] = defaultdict(list)
        for entry in module.imports:
            if entry.local:
                statements[entry.line].append(entry.target)
        for line, targets in statements.items():
            is_heavy = any(target in heavy or is_heavy_package(target) for target in targets)
            found[is_heavy].add(f"{module.path.relative_to(root)}:{line} {', '.join(sorted(set(targets)))}")
    total = len(found[True]) + len(found[False])
    yield Row("flows: local imports", str(total), "≤ 60")
    yield Row("flows: local imports, heavy", str(len(found[True])), "≤ 60", tuple(sorted(found[True])))
    yield Row("flows: local imports, light", str(len(found[False])), "0", tuple(sorted(found[False])))


def name_rows(modules: dict[str, Module], root: Path) -> Iterator[Row]:
    """Yield the rows about docstrings and names."""
    public = [
        (module, name, node)
        for module in modules.values()
        for name, node, is_public in functions_of(module)
        if is_public
    ]
    missing = tuple(
        f"{module.path.relative_to(root)}:{node.lineno} {name}"
        for module, name, node in public
        if not ast.get_docstring(node)
    )
    yield Row("public functions without docstring", f"{len(missing)} of {len(public)}", "< 40", missing)
    stems = Counter(name.split(".")[-1] for name, module in modules.items() if not module.is_package)
    twice = {stem: count for stem, count in stems.most_common() if count > 1}
    files = sorted(name for name, module in modules.items() if not module.is_package)
    places = tuple(f"{stem}: {', '.join(name for name in files if name.split('.')[-1] == stem)}" for stem in twice)
    yield Row("module names used twice", str(len(twice)), "≤ 4", places)
    gerunds = sorted(name for name, module in modules.items() if name.endswith("ing") and not module.is_package)
    yield Row("modules named with -ing", str(len(gerunds)), "≤ 8", tuple(gerunds))


def loss_row(modules: dict[str, Module]) -> Row:
    """Return how many files a reader opens for the whole loss.

    These are the files on the shortest way of imports from the update stage to the one that defines ``hacpo_loss``,
    and what that one imports of the project.
    """
    graph = import_graph(modules)
    homes = [
        name
        for name, module in modules.items()
        for node in module.tree.body
        if isinstance(node, Function) and node.name == "hacpo_loss"
    ]
    files: set[str] = set()
    for home in homes:
        files |= {*shortest_path(graph, "stages.update", home), *reachable(graph, home)}
    files = {name for name in files - NOT_PART_OF_THE_LOSS if not modules[name].is_package}
    return Row("files to read for the loss", str(len(files)), "3", tuple(sorted(files)))


def docs_rows(root: Path) -> Iterator[Row]:
    """Yield the rows about type checking and the documentation."""
    settings = root / "pyproject.toml"
    mypy = tomllib.loads(settings.read_text())["tool"]["mypy"] if settings.exists() else {}
    packages = mypy.get("packages", []) if mypy.get("strict") else []
    yield Row("strict mypy", ", ".join(packages) or "nothing", ", ".join(sorted(PACKAGES)))
    pages = sorted(path.name for path in (root / "docs" / "decisions").glob("[0-9]*.md"))
    yield Row("decision pages", str(len(pages)), "~20", tuple(pages))
    long_lines = [
        (len(line), f"{path.relative_to(root)}:{number}")
        for path in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > LONG_MARKDOWN_LINE
    ]
    places = tuple(f"{size}  {place}" for size, place in sorted(long_lines, reverse=True))
    yield Row(f"markdown lines over {LONG_MARKDOWN_LINE} characters", str(len(long_lines)), "0", places)


def all_rows(root: Path) -> list[Row]:
    """Return the whole table for the source tree at ``root``."""
    modules = read_modules(root)
    return [
        *size_rows(modules, root),
        *flows_rows(modules, root),
        loss_row(modules),
        *name_rows(modules, root),
        *docs_rows(root),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="How readable the code is, in numbers. A picture and no gate.")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parents[1], help="the source tree to read"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list up to N places behind each number")
    options = parser.parse_args()
    rows = all_rows(options.root.resolve())
    if options.json:
        print(json.dumps({row.name: {"now": row.now, "target": row.target} for row in rows}, indent=1))
        return
    width = max(len(row.name) for row in rows)
    middle = max(len(row.now) for row in rows)
    print(f"{'':{width}}  {'now':{middle}}  target")
    for row in rows:
        print(f"{row.name:{width}}  {row.now:{middle}}  {row.target}")
        for place in row.places[: options.worst]:
            print(f"    {place}")


if __name__ == "__main__":
    main()
