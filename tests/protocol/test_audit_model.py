"""`zloss.audit_model`: the numbers and files of `zloss audit` for a name, a model in memory and any other module."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zloss
from tests.tiny_models import VOCAB, save_model
from zloss.cli.main import main
from zloss.decide.answer import DecidedResults
from zloss.errors import CheckpointError, InputError, OutputError, UnknownNameError
from zloss.report.files import render_page
from zloss.results.audit import AuditReport
from zloss.results.files import read_record
from zloss.text import pydoc_topics

BLOCKS, SIZE = 6, 32
QUICK: dict[str, Any] = {"blocks": BLOCKS, "block_size": SIZE, "gradient_blocks": 2}
OF_THE_RUN = ("provenance", "timings")
"""Keys of report.json that differ between two audits of the same thing."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join(pydoc_topics()[:20]))
    return path


@pytest.fixture(scope="module", params=["gpt2", "phi", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied head; an untied one with a bias; one with a cap."""
    return save_model(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def command(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `zloss audit` writes."""
    out = tmp_path_factory.mktemp("command") / "audit"
    quick = ["--blocks", str(BLOCKS), "--block-size", str(SIZE), "--gradient-blocks", "2", "--quiet"]
    assert main(["audit", str(folder), "--text", str(text), "--out", str(out), *quick]) == 0
    return out


def load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def rows_of(tokenizer: Any, text: Path) -> Tensor:
    """The blocks of the command as rows [B, N + 1]."""
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False).input_ids)
    return ids[: BLOCKS * SIZE + 1].unfold(0, SIZE + 1, SIZE)


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def without(report: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in (*OF_THE_RUN, *keys)}


def files_of(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def test_a_name_gives_the_files_of_the_command(folder: Path, text: Path, command: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    result = zloss.audit_model(folder, texts=text, **QUICK)
    out = tmp_path / "audit"
    written = result.save(out)
    mine, theirs = files_of(out), files_of(command)
    assert mine.keys() == theirs.keys() == {str(path.relative_to(out)) for path in written}
    assert result.to_dict() == report_of(out)
    assert without(report_of(out)) == without(report_of(command))
    tables = [parquet.read_table(place / "tokens.parquet") for place in (out, command)]
    assert tables[0].equals(tables[1], check_metadata=True)
    for name in mine:
        if name.startswith("figures/"):
            assert mine[name].read_bytes() == theirs[name].read_bytes(), name
    # The page with the provenance of the command.
    there = read_record(command / "report.json", AuditReport)
    here = replace(result.report, provenance=there.provenance, timings=there.timings)
    assert render_page(DecidedResults(audits=(here,))) == theirs["report.html"].read_text()


def test_a_model_in_memory_gives_the_numbers_of_the_command(folder: Path, text: Path, command: Path) -> None:
    model, tokenizer = load(folder)
    model.train()
    modes = [part.training for part in model.modules()]
    assert any(modes)
    wanted = report_of(command)
    found = zloss.audit_model(model, tokenizer=tokenizer, texts=[text], **QUICK).to_dict()
    assert without(found, "model") == without(wanted, "model")
    assert found["model"] == wanted["model"] | {"source": "memory"}
    assert [part.training for part in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    by_ids = zloss.audit_model(model, rows_of(tokenizer, text), tokenizer=tokenizer, gradient_blocks=2).to_dict()
    assert without(by_ids, "model", "corpus", "verdict") == without(wanted, "model", "corpus", "verdict")
    assert without(by_ids["verdict"], "confidence") == without(wanted["verdict"], "confidence")  # it names the text
    assert by_ids["corpus"]["predictions"] == wanted["corpus"]["predictions"]


def test_the_same_model_by_its_head_and_hidden_states(folder: Path, text: Path, command: Path) -> None:
    model, tokenizer = load(folder)
    cap = model.config.get_text_config().to_dict().get("final_logit_softcapping")
    result = zloss.audit_model(
        model,
        rows_of(tokenizer, text),
        tokenizer=tokenizer,
        head=model.get_output_embeddings(),
        hidden_of=lambda ids: model.base_model(input_ids=ids, use_cache=False).last_hidden_state,
        softcap=cap,
        gradient_blocks=2,
    )
    wanted, found = report_of(command), result.to_dict()
    other = ("model", "corpus", "reasons", "decisions", "verdict")
    assert without(found, *other) == without(wanted, *other)
    assert without(found["verdict"], "confidence") == without(wanted["verdict"], "confidence")
    for mine, theirs in zip(found["decisions"], wanted["decisions"], strict=True):
        assert mine == theirs or mine["stage"] == "Router reduction", mine["stage"]
    same = ("vocab", "width", "tied", "bias", "softcap", "class", "parameters", "rows_beyond_tokenizer")
    assert {key: found["model"][key] for key in same} == {key: wanted["model"][key] for key in same}
    assert "routers are only found in transformers models" in found["reasons"]["router"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BND: Tensor) -> Tensor:
        # A mean over the tokens so far: causal without attention.
        seen = torch.arange(1, x_BND.shape[1] + 1, dtype=x_BND.dtype)[:, None]
        return x_BND + self.out(F.gelu(self.mix(self.norm(x_BND.cumsum(dim=1) / seen))))


class Written(nn.Module):
    """A language model written by hand; its layers are in a list, or where they cannot be found."""

    def __init__(self, *, tied: bool, listed: bool, cap: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        vocab, width = 40, 12
        self.cap, layers = cap, [Block(width) for _ in range(2)]
        self.table = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(layers) if listed else nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=not tied)
        if tied:
            self.head.weight = self.table.weight
        with torch.no_grad():
            self.head.weight.mul_(1.5).add_(0.3 * torch.randn(width))

    def hidden(self, ids_BN: Tensor) -> Tensor:
        x_BND = self.table(ids_BN)
        for layer in self.layers:
            x_BND = layer(x_BND)
        found: Tensor = self.norm(x_BND)
        return found

    def forward(self, ids_BN: Tensor, target_BN: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        z = self.head(self.hidden(ids_BN))
        z = z if self.cap is None else self.cap * torch.tanh(z / self.cap)
        return z, None if target_BN is None else F.cross_entropy(z.flatten(0, 1), target_BN.flatten())


CASES = {
    "tied, layers in a list": {"tied": True, "listed": True},
    "tied": {"tied": True, "listed": False},
    "untied with a bias": {"tied": False, "listed": False},
    "capped": {"tied": False, "listed": True, "cap": 3.0},
}


@pytest.fixture(params=CASES)
def written(request: pytest.FixtureRequest) -> Written:
    return Written(**CASES[request.param]).double()


def some_rows(count: int = 5, length: int = 17) -> Tensor:
    return torch.randint(40, (count, length), generator=torch.Generator().manual_seed(1))


def plain_numbers(model: Written, rows: Tensor, coef: float) -> dict[str, Any]:
    """Heads and gradients by their definitions: whole logits, autograd, numpy quantiles."""
    weight, target_T = model.head.weight, rows[:, 1:].flatten()
    z = model(rows[:, :-1])[0].flatten(0, 1)
    c, p, log_z, mu = math.log(z.shape[1]), z.softmax(1), z.logsumexp(1), z.mean(1)
    slope = p if model.cap is None else p * (1 - (z / model.cap) ** 2)
    q = slope @ weight
    numbers: dict[str, Any] = {"ppl": math.exp(F.cross_entropy(z, target_T).item())}

    def side(z: Tensor, log_z: Tensor, q: Tensor) -> dict[str, float]:
        violation = (log_z - c).abs()
        return {
            "diag_z": (coef * violation.square().mean()).item(),
            "p_z_999": quantile(violation, 0.999),
            "a_p_99": quantile(q.norm(dim=1) / p.norm(dim=1), 0.99),
            "log_z_mean": log_z.mean().item(),
            "delta_u_99": quantile(2 * coef * violation * q.norm(dim=1), 0.99),
            "row_max_999": quantile(z.amax(1), 0.999),
        }

    losses = {"ce": F.cross_entropy(z, target_T), "raw": (coef * (log_z - c) ** 2).mean()}
    numbers["raw"] = side(z, log_z, q)
    if model.cap is None:
        numbers["mu_abs_99"] = quantile(mu.abs(), 0.99)
        numbers["centered"] = side(z - mu[:, None], log_z - mu, q - weight.mean(0))
        losses["centered"] = (coef * (log_z - mu - c) ** 2).mean()
    gradients = {}
    for name, loss in losses.items():
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        of = dict(zip([key for key, _ in model.named_parameters()], found, strict=True))
        at_head = of["table.weight" if model.head.weight is model.table.weight else "head.weight"]
        gradients[name] = (at_head.flatten(), torch.cat([each.flatten() for each in of.values()]))

    def against_ce(name: str, part: int) -> dict[str, float]:
        g, ce = gradients[name][part], gradients["ce"][part]
        return {"r_z": (g.norm() / ce.norm()).item(), "c_z": F.cosine_similarity(g, ce, dim=0).item()}

    # The output path alone: the same loss on hidden states without a graph.
    alone = F.linear(model.hidden(rows[:, :-1]).detach().flatten(0, 1), weight, model.head.bias)
    alone = alone if model.cap is None else model.cap * torch.tanh(alone / model.cap)
    (output,) = torch.autograd.grad((coef * (alone.logsumexp(1) - c) ** 2).mean(), [weight])
    into = gradients["raw"][0] - output.flatten()
    numbers["paths"] = {
        "output_norm": output.norm().item(),
        "input_norm": into.norm().item(),
        "cosine": F.cosine_similarity(output.flatten(), into, dim=0).item(),
    }
    numbers["gradient"] = {name: against_ce(name, 0) for name in losses if name != "ce"}
    numbers["gradient"]["whole_model"] = against_ce("raw", 1)
    return numbers


def quantile(values: Tensor, q: float) -> float:
    return float(np.quantile(values.detach().numpy(), q))


def test_a_model_written_by_hand_has_the_numbers_of_the_definitions(written: Written, tmp_path: Path) -> None:
    rows = some_rows()
    wanted = plain_numbers(written, rows, 1e-3)
    result = zloss.audit_model(
        written, rows, head=written.head, hidden_of=written.hidden, softcap=written.cap, diag_coef=1e-3, batch_blocks=2
    )
    found = result.to_dict()
    tied = written.head.weight is written.table.weight
    assert (found["model"]["tied"], found["model"]["dtype"], found["model"]["name"]) == (tied, "fp64", "Written")
    assert found["ppl"] == pytest.approx(wanted["ppl"], rel=1e-10)
    for coordinate in ("raw", "centered") if written.cap is None else ("raw",):
        for key, value in wanted[coordinate].items():
            assert found["heads"][coordinate][key] == pytest.approx(value, rel=1e-9), (coordinate, key)
    assert found["mu_abs_99"] == (None if written.cap else pytest.approx(wanted["mu_abs_99"], rel=1e-9))
    for name, numbers in wanted["gradient"].items():
        assert found["gradient"][name] == pytest.approx(numbers, rel=1e-8), name
    assert (found["tied_paths"] is None) != tied
    if tied:
        assert found["tied_paths"]["raw"] == pytest.approx(wanted["paths"], rel=1e-8)
    assert all(parameter.grad is None for parameter in written.parameters())
    # Without a tokenizer tokens are shown by their ids, in the context of their own row.
    first = found["extreme_tokens"][0]["tokens"][0]
    block, position = first["block"], first["position"]
    assert first["target"] == str(int(rows[block, position + 1]))
    assert first["context"] == " ".join(map(str, rows[block, max(0, position - 15) : position + 1].tolist()))
    assert found["model"]["rows_beyond_tokenizer"] is None
    result.save(tmp_path / "out")
    assert report_of(tmp_path / "out") == found
    assert main(["report", str(tmp_path / "out"), "--quiet", "--out", str(tmp_path / "page")]) == 0


def test_wrong_numbers_would_be_seen() -> None:
    """The comparison above fails for another λ and for a head that is not tied."""
    model, rows = Written(tied=True, listed=False).double(), some_rows()
    right, wrong = (plain_numbers(model, rows, coef)["gradient"]["raw"]["r_z"] for coef in (1e-3, 1.1e-3))
    assert right != pytest.approx(wrong, rel=1e-8)
    copy = nn.Linear(12, 40, bias=False).double()
    copy.weight = nn.Parameter(model.head.weight.detach().clone())
    found = zloss.audit_model(model, rows, head=copy, hidden_of=model.hidden, diag_coef=1e-3).to_dict()
    assert found["model"]["tied"] is False
    assert found["gradient"]["raw"]["r_z"] != pytest.approx(right, rel=1e-3)


class Letters:
    """A tokenizer that is not of transformers."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("A") + index) for index in ids)


def test_any_object_with_decode_shows_text() -> None:
    """`decode` was called with options of transformers, and `len` of the tokenizer was taken."""
    model = Written(tied=False, listed=True)
    given: dict[str, Any] = {"head": model.head, "hidden_of": model.hidden, "gradient_blocks": 0}
    spelled, plain = (zloss.audit_model(model, some_rows(), tokenizer=by, **given).report for by in (Letters(), None))
    assert spelled.model.rows_beyond_tokenizer is None
    assert spelled.heads == plain.heads
    texts = [[token.target for table in report.extreme_tokens for token in table.tokens] for report in (spelled, plain)]
    assert texts[1]
    assert texts[0] == [Letters().decode([int(index)]) for index in texts[1]]


def test_a_target_of_log_v_is_the_default() -> None:
    """It raised a TypeError."""
    model = Written(tied=False, listed=True)
    given: dict[str, Any] = {"head": model.head, "hidden_of": model.hidden, "gradient_blocks": 0}
    by_word, default, zero = (
        zloss.audit_model(model, some_rows(), target=target, **given).report.planned for target in ("log_v", None, 0.0)
    )
    assert by_word == default != zero


def test_a_table_passed_as_head_is_tied_and_a_notebook_shows_the_page() -> None:
    model = Written(tied=True, listed=True)
    del model.head
    model.forward = lambda ids: model.hidden(ids) @ model.table.weight.T  # type: ignore[method-assign, assignment]
    result = zloss.audit_model(model, some_rows().tolist(), head=model.table, hidden_of=model.hidden, name="mine")
    report = result.to_dict()
    assert (report["model"]["name"], report["model"]["tied"], report["model"]["dtype"]) == ("mine", True, "fp32")
    assert report["model"]["logit_agreement"] < 1e-6
    shown = result._repr_html_()
    assert shown is not None
    assert shown.startswith("<iframe sandbox")
    assert result.verdict is not None
    said = f"80 predictions, PPL {report['ppl']:.4g}. {result.verdict.sentence}"
    assert repr(result) == f"AuditResult(mine on unnamed text: {said})"
    assert len(result.tokens["ce"]) == 80
    # Nothing to compare with: the model takes other arguments, and the head takes ids.
    model.forward = lambda ids, more: ids  # type: ignore[method-assign, assignment, misc]
    alone = zloss.audit_model(model, some_rows(), head=model.table, hidden_of=model.hidden).to_dict()
    assert alone["model"]["logit_agreement"] is None
    assert alone["heads"] == report["heads"]


def test_a_16_bit_model_is_audited_as_it_is() -> None:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "float16")):
        model = Written(tied=False, listed=True).to(dtype)
        report = zloss.audit_model(model, some_rows(), head=model.head, hidden_of=model.hidden).to_dict()
        assert (report["model"]["dtype"], report["status"]) == (name, "complete")
        assert report["gradient"]["raw"]["r_z"] > 0


def test_what_cannot_be_audited_is_one_sentence(tmp_path: Path) -> None:
    model, capped, rows = Written(tied=False, listed=True), Written(tied=False, listed=True, cap=0.5), some_rows()
    given: dict[str, Any] = {"head": model.head, "hidden_of": model.hidden}

    def cheating(ids: Tensor) -> Tensor:
        return model.hidden(ids).flip(1)

    def failing(ids: Tensor) -> Tensor:
        raise RuntimeError("my own mistake")

    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (InputError, "not a transformers model: pass `head`", rows, {}),
        (InputError, "belong together", rows, {"head": model.head}),
        (InputError, r"needs `tokens`, ids \[B, N \+ 1\], or a `tokenizer`", None, given),
        (InputError, "cannot be combined", rows, given | {"texts": "a.txt"}),
        (InputError, "hold the id 40, but the head of Written has 40 rows", rows + 40 - rows.max(), given),
        (InputError, "holds the id -100: .* without padding", rows - 100 - rows.min(), given),
        (InputError, r"token ids \[B, N \+ 1\]", rows[0], given),
        (InputError, "dtype torch.float32", rows.float(), given),
        (
            InputError,
            r"hidden states \[1, 16, 12\] .* but gave \[1, 16\]",
            rows,
            given | {"hidden_of": lambda ids: ids},
        ),
        (InputError, "a weight .V, D., but Block has none", rows, given | {"head": model.layers[0]}),
        (InputError, "without a graph", rows, given | {"hidden_of": torch.no_grad()(model.hidden)}),
        (InputError, "`valid_vocab` is 'tokenizer', but there is none", rows, given | {"valid_vocab": "tokenizer"}),
        (UnknownNameError, "Did you mean 'gradient_blocks'", rows, given | {"gradient_block": 3}),
        (
            InputError,
            "`target` is expected to be a number, 'log_v' .* or None, but got 'V'",
            rows,
            given | {"target": "V"},
        ),
        (InputError, "decode.list of ids. -> str`, but is a dict without", rows, given | {"tokenizer": {"a": 0}}),
        (InputError, "can decode text but not encode it .*: pass `tokens`", None, given | {"tokenizer": Letters()}),
        (CheckpointError, "not causal", rows, given | {"hidden_of": cheating}),
        (
            CheckpointError,
            "do not reproduce the logits",
            rows,
            given | {"hidden_of": lambda ids: 2 * model.hidden(ids)},
        ),
    ]
    for kind, sentence, tokens, options in cases:
        with pytest.raises(kind, match=sentence):
            zloss.audit_model(model, tokens, **options)
    with pytest.raises(CheckpointError, match="`logit_scale` or `softcap` if the model scales or caps its logits"):
        zloss.audit_model(capped, rows, head=capped.head, hidden_of=capped.hidden)
    with pytest.raises(InputError, match="is a name"):
        zloss.audit_model("owner/name", rows, **given)
    with pytest.raises(InputError, match="torch module or a name, but got int"):
        zloss.audit_model(3, rows)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="my own mistake"):
        zloss.audit_model(model, rows, head=model.head, hidden_of=failing)
    no_gradient = zloss.audit_model(
        model, rows, head=model.head, hidden_of=torch.no_grad()(model.hidden), gradient_blocks=0
    )
    assert no_gradient.report.gradient is None
    no_gradient.save(tmp_path, figures=False)
    other = zloss.audit_model(model, rows, **given, name="other")
    with pytest.raises(OutputError, match="holds an audit of Written"):
        other.save(tmp_path)
    other.save(tmp_path, figures=False, force=True)
    assert report_of(tmp_path)["model"]["name"] == "other"


def test_a_transformers_model_in_memory_is_named_by_its_id(tmp_path: Path) -> None:
    model, _ = load(save_model("neox", tmp_path / "neox"))
    rows = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="`logit_scale` and `softcap` belong to `head`"):
        zloss.audit_model(model, rows, softcap=3.0)
    with pytest.raises(InputError, match=r"the input embedding of .* has 512 rows"):
        zloss.audit_model(model, rows + VOCAB)
    model.config._name_or_path = "owner/name"
    assert zloss.audit_model(model, rows).report.model.name == "owner/name"
