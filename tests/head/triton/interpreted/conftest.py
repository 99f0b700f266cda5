"""Settings of all checks on Triton's interpreter."""

from __future__ import annotations

from tests.quick_interpreter import make_interpreter_quick

make_interpreter_quick()
