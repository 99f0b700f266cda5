"""Write every generated page and figure: `python -m tools.docs`."""

from __future__ import annotations

from tools.docs.generated import ROOT, generated

for path, text in generated().items():
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
