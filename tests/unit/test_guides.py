"""Every example of the guides runs."""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deltafmt.cli import main
from deltafmt.cli.main import VERBS

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "spec" / "guide"


def fences(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (GUIDES / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["writer.md", "detectors.md", "receiver.md", "sharded.md", "storage.md"])
def test_python(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # As torchrun starts the only rank of a job.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for key, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(key, str(value))
    names: dict[str, object] = {}
    for number, example in enumerate(fences(page, "python")):
        exec(compile(example, f"{page}, example {number}", "exec"), names)


def test_first_page(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = torch.nn.Linear(8, 8).bfloat16()

    def train(model: torch.nn.Linear, batch: int) -> None:
        with torch.no_grad():
            model.weight[batch] += 1

    engine = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    names = {
        "model": model,
        "train": train,
        "batches": range(3),
        "engine_tensors": engine,
        "engine_layout": None,
    }
    assert "/shared/run" in example
    exec(compile(example.replace("/shared/run", str(tmp_path / "run")), "README.md", "exec"), names)
    assert names["receiver"].version == 3  # type: ignore[attr-defined]
    assert all(torch.equal(engine[name], tensor) for name, tensor in model.state_dict().items())


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {"w": torch.randn(100, 50).bfloat16(), "v": torch.zeros(3)}
    for name in ("checkpoint", "checkpoint-200"):
        Path(name).mkdir()
        save_file(weights, f"{name}/model.safetensors")
        weights["w"] = weights["w"].clone()
        weights["w"][0, 0] += 1
    for line in "".join(fences("operator.md", "sh") + fences("retention.md", "sh")).splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
    assert Path("newest/model.safetensors").exists()
    for example in fences("retention.md", "python"):
        exec(compile(example, "retention.md", "exec"), {})


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "spec").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in link:
            assert (page.parent / link.partition("#")[0]).exists(), link
    for path in re.findall(r"`((?:tools|spec)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_every_verb_is_told_in_a_guide() -> None:
    told = "".join(page.read_text() for page in GUIDES.glob("*.md")) + (ROOT / "README.md").read_text()
    for verb in VERBS:
        name = verb.__name__.rsplit(".", 1)[-1]
        assert re.search(rf"deltafmt {name}\b", told), name
