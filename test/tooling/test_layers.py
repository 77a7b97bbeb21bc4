"""scripts/check_layers.py finds planted violations, and the repository passes it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "check_layers", ROOT / "scripts" / "check_layers.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_layers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


checker = load_checker()

# A small tree with one file per layer, so that imports resolve.
PY_FILES = """
__init__ entrypoints/__init__ entrypoints/llm entrypoints/cli server/__init__ server/http_server
server/config server/http/middleware server/generation/job server/openai/routes server/ollama/routes
engine/__init__ engine/config engine/core engine/llm_engine engine/engine_client engine/scheduler
engine/block_manager engine/input_processor engine/output_processor engine/executor engine/worker
models/__init__ models/base models/qwen2 models/loading/__init__ tokenization/__init__
models/families/__init__ common/__init__ common/types common/errors libllaisys/__init__
libllaisys/model
""".split()
CPP_FILES = """
base/check.hpp device/runtime.hpp tensor/tensor.hpp ops/common.hpp ops/add/op.hpp ops/add/cpu.hpp
ops/rope/op.hpp ops/rope/cpu.hpp ops/cpu/rows.hpp device/cpu/thread_pool.hpp
parallel/process_group.hpp runtime/weights/weights.hpp
runtime/workspace/workspace.hpp runtime/kv_cache/kv_cells.hpp runtime/output/output_buffer.hpp
runtime/graph/graph.hpp runtime/runner/model_runner.hpp runtime/runner/sampler.hpp models/model.hpp
models/registry.hpp models/qwen2/qwen2.hpp models/mock/mock.hpp capi/handles.hpp
""".split()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in PY_FILES:
        write(tmp_path, f"python/llaisys/{name}.py", "")
    for name in CPP_FILES:
        write(tmp_path, f"src/{name}", "#pragma once\n")
    write(tmp_path, "include/llaisys/types.h", "#include <stdint.h>\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def violations(root: Path) -> list[str]:
    return [str(found) for found in checker.check(root)]


def test_empty_tree_of_layers_passes(tree):
    assert violations(tree) == []


def py(file: str, line: str, rule: str) -> tuple[str, str, str]:
    return f"python/llaisys/{file}.py", line, rule


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        py("entrypoints/llm", "import llaisys.models.qwen2", "entrypoints must not import models"),
        py("entrypoints/llm", "from llaisys import libllaisys", "must not import libllaisys"),
        py("entrypoints/cli", "from ..engine import worker", "must not import engine/worker"),
        py("server/http_server", "from llaisys.models import base", "must not import models/base"),
        py("server/http_server", "from llaisys.engine.worker import Worker", "engine/worker"),
        py("server/config", "from .http import middleware", "must not import server/http"),
        py("server/http/x", "from ..openai import routes", "must not import server/openai"),
        py("server/generation/job", "from ..openai import routes", "must not import server/openai"),
        py("server/ollama/routes", "from ..openai import routes", "must not import server/openai"),
        py("server/new", "from .http import middleware", "server must not import server/http"),
        py("engine/core", "from llaisys.models.base import Adapter", "must not import models/base"),
        py("engine/core", "from llaisys import libllaisys", "must not import libllaisys"),
        py("engine/core", "import ctypes", "must not import ctypes (allowed in: libllaisys)"),
        py("engine/llm_engine", "from .worker import Worker", "must not import engine/worker"),
        py("engine/scheduler", "from .executor import Executor", "must not import engine/executor"),
        py("engine/scheduler", "import numpy as np", "engine/scheduler must not import numpy"),
        py("engine/block_manager", "from numpy import array", "must not import numpy"),
        py("engine/block_manager", "from .scheduler import X", "must not import engine/scheduler"),
        py("engine/block_manager", "from llaisys.models import base", "must not import models"),
        py("engine/executor", "from .scheduler import X", "must not import engine/scheduler"),
        py("engine/worker", "from llaisys.server import x", "must not import server"),
        py("engine/worker", "from llaisys import libllaisys", "must not import libllaisys"),
        py("engine/config", "from .core import EngineCore", "must not import engine/core"),
        py("engine/input_processor", "from . import core", "must not import engine/core"),
        py("models/qwen2", "from llaisys.engine.config import X", "must not import engine/config"),
        py("models/qwen2", "import llaisys.server", "models must not import server"),
        py("models/qwen2", "from ctypes import c_int", "must not import ctypes"),
        py("models/loading/__init__", "from ...engine import core", "must not import engine/core"),
        py("models/loading/__init__", "from .. import families", "must not import models/families"),
        py("libllaisys/model", "from ..models import base", "must not import models/base"),
        py("libllaisys/model", "from ..common import types", "must not import common/types"),
        py("tokenization/__init__", "from llaisys.engine import config", "must not import engine"),
        py("common/types", "from llaisys.tokenization import x", "must not import tokenization"),
        py("common/types", "import llaisys", "must not import the package itself"),
        py("common/types", "import torch", "allowed in: diagnostics/check_model"),
        py("models/qwen2", "import transformers.models", "must not import transformers"),
        py("models/qwen2", "import importlib; importlib.import_module('torch')", "import torch"),
        py("models/qwen2", "def f():\n    import torch", "must not import torch"),
        py("common/new", "import pickle", "pickle is not allowed"),
        py("common/new", "x = eval('1')", "eval() is not allowed"),
        py("common/new", "exec('1')", "exec() is not allowed"),
        py("common/new", "y = torch.load('x')", "torch.load is not allowed"),
        py("common/new", "f(trust_remote_code=True)", "trust_remote_code is not allowed"),
        py("common/new", "f(**{'trust_remote_code': 1})", "trust_remote_code is not allowed"),
        py("common/new", "np.load('x', allow_pickle=True)", "allow_pickle is not allowed"),
        py("common/new", "def broken(:", "cannot be parsed"),
        py("utils/new", "", "is in no layer"),
    ],
)  # fmt: skip
def test_planted_python_violation_is_found(tree, file, line, rule):
    write(tree, file, f'"""Planted."""\n\n{line}\n')
    found = violations(tree)
    assert any(rule in text for text in found), found
    assert all(text.startswith(f"{file}:") for text in found), found


def test_import_cycle_is_found(tree):
    write(tree, "python/llaisys/models/base.py", "def f():\n    from llaisys.models import qwen2\n")
    write(tree, "python/llaisys/models/qwen2.py", "from llaisys.models import base\n")
    (found,) = violations(tree)
    assert "import cycle: models/" in found and found.startswith("python/llaisys/models/")


def test_number_of_server_levels_is_limited(tree, monkeypatch):
    monkeypatch.setattr(checker, "SERVER_LEVELS", (*checker.SERVER_LEVELS, ("new",)))
    assert violations(tree) == ["scripts/layer_tables.py:1: the server has 9 levels; at most 8"]


def cpp(file: str, line: str, rule: str) -> tuple[str, str, str]:
    return f"src/{file}", line, rule


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        cpp("base/x.cpp", '#include "device/runtime.hpp"', "base must not include device/"),
        cpp("device/x.cpp", '#include "tensor/tensor.hpp"', "device must not include tensor/"),
        cpp("device/cpu/x.cpp", '#include "../../tensor/tensor.hpp"', "must not include tensor/"),
        cpp("tensor/x.cpp", '#include "ops/add/op.hpp"', "tensor must not include ops/add/op.hpp"),
        cpp("ops/add/x.cpp", '#include "ops/rope/cpu.hpp"', "ops/add must not include ops/rope"),
        cpp("ops/add/x.cpp", '#include "../rope/cpu.hpp"', "ops/add must not include ops/rope"),
        cpp("ops/add/x.cpp", '#include "runtime/kv_cache/kv_cells.hpp"', "runtime/kv_cache"),
        cpp("ops/add/x.cpp", '#include "models/model.hpp"', "must not include models/model.hpp"),
        cpp("ops/add/x.cu", '#include "capi/handles.hpp"', "must not include capi/handles.hpp"),
        cpp("ops/common.cpp", '#include "ops/add/cpu.hpp"', "ops must not include ops/add/cpu.hpp"),
        cpp("ops/add/op.cpp", '#include "ops/cpu/rows.hpp"', "op.cpp must not include ops/cpu/"),
        cpp("ops/add/op.cpp", '#include "device/cpu/thread_pool.hpp"', "not include device/cpu/"),
        cpp("parallel/x.cpp", '#include "runtime/weights/weights.hpp"', "must not include runtime"),
        cpp("runtime/weights/x.cpp", '#include "models/model.hpp"', "must not include models/"),
        cpp("runtime/kv_cache/x.cpp", '#include "runtime/runner/sampler.hpp"', "runtime/runner"),
        cpp("runtime/workspace/x.cpp", '#include "ops/add/op.hpp"', "must not include ops/add"),
        cpp("runtime/runner/x.cpp", '#include "models/qwen2/qwen2.hpp"', "include models/qwen2"),
        cpp("runtime/runner/x.cpp", '#include "capi/handles.hpp"', "must not include capi/"),
        cpp("models/qwen2/x.cpp", '#include "runtime/runner/sampler.hpp"', "runtime/runner/"),
        cpp("models/qwen2/x.cpp", '#include "runtime/kv_cache/kv_cells.hpp"', "runtime/kv_cache"),
        cpp("models/registry.cpp", '#include "capi/handles.hpp"', "models must not include capi/"),
        cpp("base/x.cpp", '#include "tensor/not_there.hpp"', "base must not include tensor/"),
        cpp("base/x.cpp", "#include <omp.h>", "no OpenMP"),
        cpp("base/x.cpp", "#pragma omp parallel for", "no OpenMP"),
        cpp("base/x.cpp", '#include "../../test/cpp/check.hpp"', "outside src/ and include/"),
        cpp("misc/x.cpp", "", "is in no layer"),
    ],
)  # fmt: skip
def test_planted_cpp_violation_is_found(tree, file, line, rule):
    write(tree, "test/cpp/check.hpp", "#pragma once\n")
    write(tree, file, f"// Planted.\n\n{line}\n")
    found = violations(tree)
    assert len(found) == 1 and rule in found[0], found
    assert found[0].startswith(f"{file}:{3 if line else 1}: "), found


def test_public_header_must_not_include_internal_headers(tree):
    write(tree, "include/llaisys/tensor.h", '#include "base/check.hpp"\n')
    assert violations(tree) == [
        "include/llaisys/tensor.h:1: a public header must not include base/check.hpp"
        " (it is inside src/)"
    ]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("python/llaisys/entrypoints/llm.py", "from llaisys.engine.llm_engine import LLMEngine"),
        ("python/llaisys/server/ollama/routes.py", "from ..generation import job"),
        ("python/llaisys/engine/core.py", "from .scheduler import S\nfrom .executor import E"),
        ("python/llaisys/engine/scheduler.py", "from .block_manager import B\nimport heapq"),
        ("python/llaisys/engine/worker.py", "import numpy\nfrom llaisys.models import base"),
        ("python/llaisys/models/qwen2.py", "import numpy\nfrom llaisys.libllaisys import model"),
        ("python/llaisys/libllaisys/model.py", "import ctypes\nfrom ..common.errors import E"),
        ("python/llaisys/common/types.py", '"""No pickle, eval( or exec( here."""\nf.exec()'),
        ("python/llaisys/common/types.py", "np.load('x', allow_pickle=False)"),
        ("src/base/x.cpp", '// #include "capi/handles.hpp"\n#include "llaisys/types.h"'),
        ("src/base/x.cpp", '/*\n#include "capi/handles.hpp"\n*/\n#include <vector>'),
        ("src/ops/add/x.cpp", '#include "ops/rope/op.hpp"\n#include "cpu.hpp"'),
        ("src/ops/add/x.cpp", '#include "ops/common.hpp"\n#include "ops/add/cpu.hpp"'),
        ("src/ops/add/op.cpp", '#include "ops/add/cpu.hpp"\n#include "device/runtime.hpp"'),
        ("src/ops/add/cpu.cpp", '#include "ops/cpu/rows.hpp"'),
        ("src/runtime/runner/x.cpp", '#include "models/model.hpp"\n#include "ops/add/op.hpp"'),
        ("src/models/registry.cpp", '#include "models/qwen2/qwen2.hpp"'),
        ("src/capi/x.cc", '#include "models/registry.hpp"\n#include "runtime/runner/sampler.hpp"'),
    ],
)
def test_allowed_import_is_not_reported(tree, file, text):
    write(tree, file, text + "\n")
    assert violations(tree) == []


def test_line_numbers_survive_comments(tree):
    write(tree, "src/base/x.cpp", '/* a\n b\n*/\n\n#include "capi/handles.hpp"\n')
    assert violations(tree) == ["src/base/x.cpp:5: base must not include capi/handles.hpp"]
