"""Print the shape of the source tree: lines of code, hooks, modules at the root, blocks under TYPE_CHECKING.

`python -m benchmarks.shape` prints the totals; `python -m benchmarks.shape FOLDER...` the lines of every file below.
A line of code is one that is left without docstrings, comments and blank lines.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent.parent / "src" / "fedfactor"


def code_lines(text: str) -> int:
    """Count the lines that hold code."""
    passed = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in passed]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        match node:  # a string that is a statement of its own: a docstring, or what is said of a field
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                lines -= set(range(first, last + 1))
    return len(lines)


def hooks(path: Path, name: str) -> list[str]:
    """List the public methods and properties of a class."""
    (cls,) = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef) and n.name == name)
    return [n.name for n in cls.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


def main() -> None:
    if sys.argv[1:]:
        files = [path for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py"))]
        for path in files:
            print(f"{code_lines(path.read_text()):6} {path}")
        print(f"{sum(code_lines(path.read_text()) for path in files):6} in all")
        return
    print(json.dumps(totals(), indent=1))


def totals() -> dict[str, Any]:
    """Return the figures of the whole source tree."""
    counts = {path: code_lines(path.read_text()) for path in SOURCE.rglob("*.py")}
    methods = {path.stem: count for path, count in counts.items() if path.parent.name == "methods"}
    home = next(path for path in (SOURCE / "protocol" / "method.py", SOURCE / "methods" / "base.py") if path.exists())
    return {
        "lines_of_code": sum(counts.values()),
        "type_checking_files": sum("if TYPE_CHECKING" in path.read_text() for path in counts),
        "modules_at_the_root": len(list(SOURCE.glob("*.py"))),
        "hooks_of_a_method": len(hooks(home, "Method")),
        "longest_method_file": max(methods.items(), key=lambda item: item[1]),
        "methods_over_120": sorted(name for name, count in methods.items() if count > 120),
    }


if __name__ == "__main__":
    main()
