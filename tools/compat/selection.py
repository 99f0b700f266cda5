"""The tests of a row: from every package those in which a dependency does the work; about 4 minutes on one core."""

from __future__ import annotations

MARKS = "not slow and not browser"

AREAS = {
    "losses and gradients against fp64": (
        "tests/laws/test_objectives_and_backends.py",
        "tests/head/test_head_loss.py",
        "tests/head/test_logits_loss.py",
        "tests/head/test_centering.py",
        "tests/head/triton/test_availability.py",
        "tests/head/triton/test_interpreted.py::test_interpreted[check_kernels]",
        "tests/head/triton/test_interpreted.py::test_interpreted[check_compile]",
    ),
    "routers": ("tests/router",),
    "statistics": ("tests/measure/test_tokens.py", "tests/measure/test_token_pass.py"),
    "optimizer": ("tests/optimizer/test_recorder.py",),
    "models and text": ("tests/models", "tests/text/test_blocks.py"),
    "audits": (
        "tests/measure/test_gradients.py",
        "tests/audit/checkpoint",
        "tests/audit/loss/test_on_model.py",
        "tests/audit/implementation/test_source.py",
    ),
    "training": (
        "tests/train/test_run.py::test_losses_and_norms_equal_a_straight_loop",
        "tests/train/test_run.py::test_bf16_is_autocast_over_fp32_weights",
        "tests/train/test_resume.py::test_a_killed_run_resumes_bit_for_bit",
        "tests/train/test_moe_run.py::test_metrics_against_the_saved_model",
        "tests/telemetry/test_window.py",
    ),
    "several processes": ("tests/distributed/test_data_parallel.py", "tests/distributed/test_mesh.py"),
    "integrations": ("tests/integrations",),
    "reports": (
        "tests/report/test_figures.py",
        "tests/report/test_html.py",
        "tests/report/test_terminal.py",
        "tests/decide/test_intervals.py",
        "tests/decide/test_verdict.py",
        "tests/console",
    ),
    "protocols": ("tests/protocol/test_center.py::test_the_copy_loads_without_our_package",),
    "command line": (
        "tests/cli/test_main.py",
        "tests/cli/test_options.py",
        "tests/cli/test_audit.py::test_an_audit_writes_its_report_and_prints_its_table",
        "tests/cli/test_train.py::test_one_folder_per_run",
        "tests/cli/test_train.py::test_a_stress_setting_and_tensorboard",
    ),
    "results": ("tests/results/test_io.py",),
}
DESELECTED = (
    "tests/cli/test_main.py::test_help_answers_in_half_a_second",
    "tests/models/test_hub.py::test_every_command_reports_a_missing_model_alike_and_immediately",
)
"""Limits in seconds depend on how busy the machine is, not on the installed versions."""
FILES = tuple(file for files in AREAS.values() for file in files)
