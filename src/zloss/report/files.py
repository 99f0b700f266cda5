"""An audit's files: report.json and report.html, and the figures on request."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from zloss.errors import OutputError
from zloss.report.charts.matplotlib_files import write_figures
from zloss.report.html.page import Page, write_page
from zloss.results.audit import AuditReport
from zloss.results.writing import write_json


def check_folder(folder: Path) -> None:
    """See before the work starts that its result can be written."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OutputError(f"cannot write to {folder}: {existing} is not a writable folder. Choose another with --out.")
    probe = existing / f".zloss-{os.getpid()}"
    try:
        probe.write_bytes(b"0")
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror}. Choose another with --out.") from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def write_audit(folder: Path, report: AuditReport, *, figures: bool = True) -> list[Path]:
    """report.json, report.html, then figures; each appears whole or not at all."""
    record, page = folder / "report.json", folder / "report.html"
    write_json(record, report.to_dict())
    write_page(page, Page((report,)))
    return [record, page, *(write_figures(folder / "figures", report) if figures else [])]
