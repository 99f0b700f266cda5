"""The tests of a row: out of every room those in which a dependency does the work; about 4 minutes on one core."""

from __future__ import annotations

MARKS = "not slow and not browser"

ROOMS = {
    "losses and gradients against fp64": (
        "tests/laws/test_objectives_and_backends.py",
        "tests/laws/test_paper_identities.py",
        "tests/transport/test_head_loss.py",
        "tests/transport/test_logits_loss.py",
        "tests/transport/test_interventions.py",
        "tests/transport/backends",
    ),
    "routers": ("tests/source/router", "tests/audit/router/test_measure.py", "tests/integrations/test_moe.py"),
    "statistics": (
        "tests/streaming/test_histogram.py",
        "tests/streaming/test_quantiles.py",
        "tests/laws/test_accumulators.py",
    ),
    "optimizer": ("tests/optimizer",),
    "models and text": ("tests/models", "tests/text"),
    "audits": (
        "tests/measure/test_whole_model.py",
        "tests/audit/checkpoint",
        "tests/audit/loss/test_identification.py",
        "tests/audit/loss/test_mixed_precision.py",
        "tests/audit/implementation/test_run.py",
    ),
    "training": (
        "tests/train/test_run.py",
        "tests/train/test_resume.py",
        "tests/train/moe/test_run.py",
        "tests/telemetry/test_window.py",
    ),
    "several processes": ("tests/ranks/test_vocabulary_parallel.py",),
    "integrations": ("tests/integrations",),
    "reports": ("tests/report/charts", "tests/report/html/test_html.py", "tests/report/terminal"),
    "protocols": ("tests/protocol/center",),
    "command line": (
        "tests/cli/test_main.py",
        "tests/cli/test_options.py",
        "tests/cli/test_audit.py",
        "tests/cli/test_train.py",
    ),
    "results": ("tests/results/test_writing.py", "tests/results/test_reading.py", "tests/laws/test_results.py"),
}
FILES = tuple(file for files in ROOMS.values() for file in files)
