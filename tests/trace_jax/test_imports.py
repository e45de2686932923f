"""Imports go one way: experiments -> trace_jax -> kernels_pallas, and floor by floor inside `trace_jax`."""

import ast
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("kernels_pallas", "trace_jax", "experiments")
# What each part of `trace_jax` may import of the others. `config` is for all: it imports none of them.
ALLOWED = {
    "config": set(),
    "parallel": set(),
    "guidance": set(),
    "quant": {"guidance", "parallel"},
    "models": {"quant", "guidance", "parallel"},
    "hf": {"models", "quant", "parallel"},
    "rollout": {"models", "quant", "guidance", "parallel"},
    "rl": {"rollout", "hf", "models", "quant", "guidance", "parallel", "alignment", "tasks", "data", "runs"},
    "alignment": {"guidance", "quant"},  # reads records and quant
    "data": set(),  # knows no model and no task
    "tasks": {"data"},  # knows no model
    "runs": set(),  # knows no model
}


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): ast.parse(path.read_text())
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def own(name: str) -> bool:
    return name.split(".")[0] in PACKAGES


def imports(tree: ast.Module) -> list[tuple[str, str | None]]:
    """(module, name) of every import of our packages, wherever it stands; name None for `import module`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            found += [(node.module, alias.name) for alias in node.names]
    return [(module, name) for module, name in found if own(module)]


def targets(tree: ast.Module) -> set[str]:
    """Modules that a module imports; `from package import module` counts as that module."""
    return {f"{m}.{n}" if n and f"{m}.{n}" in SOURCES else m for m, n in imports(tree)}


def test_there_is_something_to_check():
    assert {"trace_jax.rl.loop", "trace_jax.models.layers", "kernels_pallas.formats"} <= set(SOURCES)
    assert "trace_jax.rollout.sampler" in SOURCES and targets(SOURCES["trace_jax.rollout.sampler"])


@pytest.mark.parametrize("module", SOURCES)
def test_packages_import_only_downwards(module):
    below = PACKAGES[: PACKAGES.index(module.split(".")[0]) + 1]
    wrong = [name for name in targets(SOURCES[module]) if name.split(".")[0] not in below]
    assert not wrong, f"{module} imports {wrong}"


@pytest.mark.parametrize("module", [name for name in SOURCES if name.startswith("trace_jax.")])
def test_parts_of_trace_jax_import_only_from_below(module):
    part = module.split(".")[1]
    assert part in ALLOWED, f"{part} has no place in the order of trace_jax; add it to ALLOWED"
    parts = {name.split(".")[1] for name in targets(SOURCES[module]) if name.startswith("trace_jax.")}
    wrong = parts - ALLOWED[part] - {part, "config"}
    assert not wrong, f"{module} imports from {sorted(wrong)}; {part} may use {sorted(ALLOWED[part])}"


def test_no_cycles():
    graph = {module: targets(tree) - {module} for module, tree in SOURCES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the cycle


@pytest.mark.parametrize("module", SOURCES)
def test_no_private_names_of_other_modules(module):
    tree = SOURCES[module]
    wrong = [
        f"{m}.{n}" for m, n in imports(tree) if any(p.startswith("_") for p in f"{m}.{n or ''}".split("."))
    ]
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and own(node.module)
        for alias in node.names
    }
    wrong += [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in aliases
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    ]
    assert not wrong, f"{module} reaches into {wrong}"
