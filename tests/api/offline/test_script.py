"""What a script sees: imports, the README's example, the end of the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = re.compile(r"^```python\n(from loraplex import .*?)^```$", re.MULTILINE | re.DOTALL)


def run_python(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "TMPDIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )


def examples(page: str) -> list[str]:
    return EXAMPLE.findall((ROOT / page).read_text())


@pytest.mark.slow
def test_the_readmes_script_prints_what_it_says(tmp_path: Path) -> None:
    (script,) = examples("README.md")
    assert len([line for line in script.splitlines() if line.strip()]) <= 10
    ended = run_python(script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "None You asked me to list the weight and color of orders with year equal to 42.",
        "api/demo/weights/sql SELECT weight, color FROM orders WHERE year = 42;",
        'api/demo/weights/json {"action": "select", "table": "orders", '
        '"fields": ["weight", "color"], "where": [["year", "=", 42]]}',
    ]
    assert "Error" not in ended.stderr


@pytest.mark.slow
def test_a_script_that_closes_nothing_ends_well_and_leaves_no_files(
    tiny_base: Path, tmp_path: Path
) -> None:
    ended = run_python(
        "from loraplex import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_base)!r}, memory_gib=0.5, host_cache_gib=0.05, num_threads=1)\n"
        "print(len(llm.generate('a', SamplingParams(max_tokens=3, ignore_eos=True))[0]"
        ".outputs[0].token_ids))\n"
        "import sys\n"
        "print(sorted({'sqlalchemy', 'fastapi', 'starlette', 'typer'} & set(sys.modules)))\n",
        tmp_path,
    )
    assert (ended.returncode, ended.stdout) == (0, "3\n[]\n"), ended.stderr
    assert [path.name for path in tmp_path.glob("loraplex-*")] == []


def test_the_package_alone_imports_neither_torch_nor_the_classes(tmp_path: Path) -> None:
    ended = run_python(
        "import sys, loraplex\n"
        "print(sorted({'torch', 'transformers', 'pydantic'} & set(sys.modules)))\n"
        "print(hasattr(loraplex, 'LLMs'), loraplex.SamplingParams.__name__)\n"
        "print('torch' in sys.modules)\n",
        tmp_path,
    )
    assert ended.stdout == "[]\nFalse SamplingParams\nFalse\n", ended.stderr


def test_without_torch_the_import_says_what_to_install(tmp_path: Path) -> None:
    ended = run_python(
        "import sys\nsys.modules['torch'] = None\nfrom loraplex import LLM\n", tmp_path
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: LLM needs the package torch: pip install 'loraplex[engine]'"
    )


@pytest.mark.parametrize("name", ["LLM", "LLMError", "RequestOutput", "CompletionOutput"])
def test_the_classes_are_imported_from_the_package(name: str) -> None:
    import loraplex

    assert getattr(loraplex, name).__name__ == name
