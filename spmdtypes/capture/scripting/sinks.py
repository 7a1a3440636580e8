"""Stand-ins for tracking services: they take everything, send nothing, and say what they were given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from spmdtypes.capture.scripting.context import Context

# packages whose whole use is to show a run to people
LOGGERS = (
    *("wandb", "mlflow", "comet_ml", "aim", "neptune", "clearml", "tensorboardX", "torch.utils.tensorboard"),
    *("swanlab", "trackio", "dvclive", "visdom", "sacred", "nvidia_dlprof_pytorch_nvtx"),
)
OFFLINE = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}
_TEXTS = ("id", "name", "project", "entity", "group", "url", "notes", "job_type", "run_id", "experiment_id")
_FOLDERS = ("dir", "log_dir", "logdir", "artifact_uri", "path")
_NO_VALUES = frozenset(
    "step global_step epoch walltime iteration commit context config bins timestamp".split()
)
_CALLED_TEXTS = ("get_logdir", "generate_id", "get_url", "get_artifact_uri", "get_key", "project_name")


class Sink:
    """Any object of such a package: called, entered, indexed or asked for anything, it is another one.
    What is logged is noted under the names it was given."""

    def __init__(self, context: Context, package: str, path: str = "", key: str = "") -> None:
        self.__dict__.update(_context=context, _package=package, _path=path, _key=key, _made={})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = self.__dict__["_made"]
        if name not in made:
            made[name] = self._attribute(name)
        return made[name]

    def _attribute(self, name: str) -> Any:
        if name in _TEXTS:
            return "run"
        if name in _FOLDERS:
            return self._place()
        if name in ("config", "summary", "params"):
            return Table(self._context, self._package, logs=name == "summary")
        if name in _CALLED_TEXTS:
            return lambda *args, **kwargs: self._place() if name == "get_logdir" else "run"
        return Sink(self._context, self._package, name, self._key)

    def _place(self) -> str:
        folder = self._context.folder / "tracking"
        folder.mkdir(exist_ok=True)
        return str(folder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._path == "init" and self._package == "wandb":
            return self._made.setdefault("run", Run(self._context, self._package, kwargs.get("config")))
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], type):
            return args[0]  # a decorator
        note_given(self._context, self._package, (self._key, *args) if self._key else args, kwargs)
        return Sink(self._context, self._package, self._path)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_made"][name] = value

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *exc: Any) -> None: ...

    def __getitem__(self, key: Any) -> Any:
        return self.__dict__["_made"].setdefault(key, Sink(self._context, self._package, str(key), str(key)))

    def __setitem__(self, key: Any, value: Any) -> None:
        note_given(self._context, self._package, (key, value), {})
        self.__dict__["_made"][key] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self.__dict__["_path"] or self.__dict__["_package"])

    def __fspath__(self) -> str:
        return self._place()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)


class Table(dict[str, Any]):
    """A configuration or summary: what was put in comes out, as an entry or as an attribute."""

    def __init__(self, context: Context, package: str, logs: bool) -> None:
        super().__init__()
        self.__dict__.update(_context=context, _package=package, _logs=logs)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        if self.__dict__["_logs"]:
            note_given(self.__dict__["_context"], self.__dict__["_package"], (key, value), {})
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for given in args:
            for k, v in (given if isinstance(given, Mapping) else vars(given)).items():
                self[k] = v
        kwargs.pop("allow_val_change", None)
        for k, v in kwargs.items():
            self[k] = v

    setdefaults = update

    def as_dict(self) -> dict[str, Any]:
        return dict(self)


class Run(Sink):
    """A run of wandb, with the configuration it was started with."""

    def __init__(self, context: Context, package: str, config: Any = None) -> None:
        super().__init__(context, package, "run")
        if config is not None and not isinstance(config, str):
            self.config.update(config)


def note_given(context: Context, package: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Names and values in the arguments of a call that logs: a dict of them, or a name and a value."""
    from spmdtypes.capture.scripting.logs import values_in

    given = [*args, *(v for k, v in kwargs.items() if k not in _NO_VALUES)]
    name = next((a for a in (*args, *kwargs.values()) if isinstance(a, str)), "")
    value = next((a for a in given if not isinstance(a, (str, Mapping)) and a is not None), None)
    for table in (a for a in given if isinstance(a, Mapping)):
        for k, v in values_in(table):
            context.log(package, k, v)
    if name and value is not None and not any(isinstance(a, Mapping) for a in args):
        for k, v in values_in(value, name):
            context.log(package, k, v)


class _Package(ModuleType):
    """A module of such a package: every name in it is there."""

    def __init__(self, name: str, sink: Sink) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__file__ = None
        self.__version__ = "1000.0"
        self.__dict__["_sink"] = sink

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        sink = self.__dict__["_sink"]
        if name == "run":  # none before it is begun
            return sink.__dict__["_made"].get("init", Sink(None, "")).__dict__["_made"].get("run")  # type: ignore[arg-type]
        begun = sink.__dict__["_made"].get("init")
        run = begun.__dict__["_made"].get("run") if begun is not None else None
        if run is not None and name in ("config", "summary"):
            return getattr(run, name)
        return getattr(sink, name)


def make_module(context: Context, name: str) -> ModuleType:
    return _Package(name, Sink(context, name.rpartition(".")[2] if "tensorboard" in name else name))
