"""What a script shows to people is kept, and goes nowhere."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdtypes.capture.scripting.logs import numbers_in
from tests.scripting import run


def pairs(ran: Any) -> list[tuple[str, Any]]:
    return [(entry.name, float(entry.value)) for entry in ran.logged]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("loss 2.3456", [("loss", 2.3456, 1e-4)]),
        (
            "step 3 | loss: 2.5 | grad_norm=1.25e-3",
            [("step", 3, 1), ("loss", 2.5, 0.1), ("grad_norm", 1.25e-3, 1e-5)],
        ),
        (
            "[epoch 1/10] lr=3e-4, tok/s 12,345",
            [("epoch", 1, 1), ("", 10, 1), ("lr", 3e-4, 1e-4), ("tok/s", 12345, 1)],
        ),
        ("grad norm -0.5", [("grad norm", -0.5, 0.1)]),
        ("val/loss: nan", [("val/loss", float("nan"), 1)]),
        ("rank0 of gpt2 on v1.2.3", []),
        ("acc 93.1%", [("acc", 93.1, 0.1)]),
    ],
)
def test_numbers_in_text(text: str, found: list[tuple[str, float, float]]) -> None:
    got = list(numbers_in(text))
    assert [n for n, _, _ in got] == [n for n, _, _ in found]
    for (_, value, resolution), (_, wanted, size) in zip(got, found):
        assert (value == wanted or wanted != wanted) and resolution == pytest.approx(size)


def test_printed_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run(
        """
        import torch
        loss = torch.tensor(0.5)
        print("loss", loss)
        print(f"step {3} loss {loss.item():.3f}")
        print({"loss": loss, "lr": 1e-3})
        print("done")
        """,
        tmp_path,
    )
    assert [(e.name, float(e.value), e.line) for e in ran.logged] == [
        ("loss", 0.5, 4),
        ("step", 3.0, 5),
        ("loss", 0.5, 5),
        ("loss", 0.5, 6),
        ("lr", 1e-3, 6),
    ]
    source = ran.logged[0].source
    assert source is not None and source.data_ptr() == ran["loss"].data_ptr()
    assert ran.logged[2].resolution == pytest.approx(1e-3)
    assert {(e.sink, e.file) for e in ran.logged} == {("print", str(tmp_path / "train.py"))}
    assert "done" in capsys.readouterr().out


def test_logged_values(tmp_path: Path) -> None:
    ran = run(
        """
        import logging, torch
        logging.basicConfig(level=logging.INFO, filename="train.log")
        logger = logging.getLogger(__name__)
        logger.setLevel(logging.INFO)
        loss = torch.tensor(0.25)
        logger.info("loss: %s", loss)
        logger.info("step %d norm %.2f", 4, 1.5)
        logger.info(f"acc {0.75}")
        logger.debug("loss %f", 9.0)
        logging.warning("late %s", 2)
        """,
        tmp_path,
    )
    assert pairs(ran) == [("loss", 0.25), ("step", 4), ("norm", 1.5), ("acc", 0.75), ("late", 2)]
    assert {e.line for e in ran.logged} == {7, 8, 9, 11}
    assert not Path("train.log").exists()


SERVICES = {
    "wandb": """
        import wandb
        from wandb import AlertLevel
        run = wandb.init(project="p", config={"lr": 0.1}, settings=wandb.Settings(console="off"))
        assert wandb.config.lr == 0.1 and wandb.config["lr"] == 0.1 and run.config.lr == 0.1
        assert wandb.run is run and isinstance(run.id, str) and isinstance(wandb.run.name, str)
        wandb.define_metric("loss", step_metric="step")
        wandb.watch(model, log="all")
        wandb.log({"loss": loss, "train": {"lr": 0.1}}, step=3)
        run.log({"norm": 2.0})
        run.summary["best"] = 0.125
        wandb.log({"h": wandb.Histogram([1, 2])})
        run.log_artifact(wandb.Artifact("m", type="model"))
        wandb.finish()
        """,
    "tensorboard": """
        from torch.utils.tensorboard import SummaryWriter
        with SummaryWriter(log_dir="runs/x") as writer:
            writer.add_scalar("loss", loss, 3)
            writer.add_scalars("train", {"lr": 0.1}, 3)
            writer.add_scalar(tag="norm", scalar_value=2.0, global_step=1)
            writer.add_text("note", "hello")
            writer.add_graph(model, loss)
            writer.add_scalar("best", 0.125, global_step=3)
            writer.flush()
        """,
    "mlflow": """
        import mlflow
        import mlflow.pytorch
        mlflow.set_tracking_uri("http://mlflow.example.com")
        with mlflow.start_run(run_name="a") as run:
            mlflow.log_params({"lr": 0.1})
            mlflow.log_metric("loss", loss, step=3)
            mlflow.log_metrics({"norm": 2.0, "best": 0.125}, step=3)
            print(run.info.run_id)
        """,
    "comet": """
        from comet_ml import Experiment
        e = Experiment(api_key="x", project_name="p")
        e.log_parameter("lr", 0.1)
        e.log_metric("loss", loss, step=3)
        e.log_metrics({"norm": 2.0, "best": 0.125})
        """,
    "aim": """
        from aim import Run
        run = Run(experiment="x")
        run["lr"] = 0.1
        run.track(loss, name="loss", step=3, context={"subset": "train"})
        run.track(2.0, name="norm")
        run.track({"best": 0.125})
        """,
    "neptune": """
        import neptune
        run = neptune.init_run(project="a/b")
        run["train/lr"] = 0.1
        run["train/loss"].append(loss)
        run["norm"].append(2.0)
        run["best"].log(0.125)
        run.stop()
        """,
    "tensorboardX": """
        from tensorboardX import SummaryWriter
        writer = SummaryWriter()
        writer.add_scalar("train/lr", 0.1, 1)
        writer.add_scalar("loss", loss, 1)
        writer.add_scalars("all", {"norm": 2.0, "best": 0.125}, 1)
        """,
}


@pytest.mark.parametrize("name", SERVICES)
def test_tracking_services(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    head = "import torch\nmodel, loss = torch.nn.Linear(2, 2), torch.tensor(0.5)\n"
    before = {p.name for p in tmp_path.iterdir()}
    ran = run(head + __import__("textwrap").dedent(SERVICES[name]), tmp_path)
    values = {entry.name.rpartition("/")[2]: entry.value for entry in ran.logged}
    assert torch.equal(values["loss"], ran["loss"])
    assert {k: float(v) for k, v in values.items() if k in ("lr", "norm", "best")} == (
        {"lr": 0.1, "norm": 2.0, "best": 0.125}
    )
    assert {p.name for p in tmp_path.iterdir()} - before <= {"layer", "train.py"}


def test_a_service_that_was_never_begun(tmp_path: Path) -> None:
    ran = run("import wandb\nfacts = wandb.run is None", tmp_path)
    assert ran["facts"]


def test_progress_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    ran = run(
        """
        from tqdm import tqdm
        from tqdm.auto import trange
        bar = tqdm(range(3), desc="train")
        for i in bar:
            bar.set_postfix(loss=0.5 * i, lr="1e-3")
        bar.set_description(f"epoch {2} acc {0.75:.2f}")
        tqdm.write("norm 1.5")
        n = sum(1 for _ in trange(4))
        count = bar.n
        """,
        tmp_path,
    )
    assert pairs(ran) == [("loss", 0), ("loss", 0.5), ("loss", 1), ("epoch", 2), ("acc", 0.75), ("norm", 1.5)]
    assert (ran["n"], ran["count"]) == (4, 3)
    assert capsys.readouterr().err == ""


def test_printing_is_not_recorded(tmp_path: Path) -> None:
    """Nor does it need values: a fake tensor is printed as one."""
    ran = run("import torch\nx = torch.ones(3)\nprint('x', x, f'{x.shape}')", tmp_path, tensors=True)
    source = ran.logged[0].source
    assert source is not None and source.untyped_storage()._cdata == ran["x"].untyped_storage()._cdata


def test_logged_tensors_are_those_of_then(tmp_path: Path) -> None:
    """And they hold no graph, which would keep models alive."""
    ran = run(
        """
        import torch
        w = torch.ones(1, requires_grad=True)
        loss = w.sum() * 2
        print(loss)
        with torch.no_grad():
            loss += 1
        """,
        tmp_path,
    )
    assert float(ran.logged[0].value) == 2 and not ran.logged[0].value.requires_grad


def test_no_connection_is_made(tmp_path: Path) -> None:
    before = socket.socket.connect
    run("import wandb\nwandb.init()\nwandb.log({'a': 1})", tmp_path)
    assert socket.socket.connect is before
