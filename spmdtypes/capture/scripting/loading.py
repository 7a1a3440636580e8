"""Data loaders whose workers live in this process, one after the other, and give the same batches."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _SingleProcessDataLoaderIter

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context


def install(patches: Patches, context: Context) -> None:
    """Loading is no part of what is checked: it runs on real tensors and is not recorded."""
    given = itertools.count()

    @functools.wraps(DataLoader._get_iterator)
    def get_iterator(self: Any) -> Any:
        with _disable_current_modes():
            if self.num_workers == 0:
                return _SingleProcessDataLoaderIter(self)
            return InProcessIterator(self)

    @functools.wraps(_BaseDataLoaderIter.__next__)
    def next_batch(self: Any) -> Any:
        with _disable_current_modes():
            batch = following(self)
        if context.on_batch is not None:
            batch = context.on_batch(next(given), batch)
        return batch

    following = _BaseDataLoaderIter.__next__
    patches.set(DataLoader, "_get_iterator", get_iterator)
    patches.set(_BaseDataLoaderIter, "__next__", next_batch)
    # what a loader says about its surroundings is of no interest here
    patches.set(DataLoader, "check_worker_number_rationality", lambda self: None)


class _Streams:
    """The random states of one worker, swapped in while it works."""

    def __init__(self, base_seed: int, worker: int) -> None:
        before = self._get()
        seed = base_seed + worker
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            generate: Any = torch_worker._generate_state
            numpy.random.seed(generate(base_seed, worker))
        self._own = self._get()
        self._set(before)

    @staticmethod
    def _get() -> tuple[Any, ...]:
        numpy = sys.modules.get("numpy")
        state = numpy.random.get_state() if numpy is not None else None
        return torch.default_generator.get_state(), random.getstate(), state

    @staticmethod
    def _set(state: tuple[Any, ...]) -> None:
        torch.default_generator.set_state(state[0])
        random.setstate(state[1])
        if state[2] is not None:
            sys.modules["numpy"].random.set_state(state[2])

    @contextmanager
    def here(self) -> Iterator[None]:
        outside = self._get()
        self._set(self._own)
        try:
            yield
        finally:
            self._own = self._get()
            self._set(outside)


class _Worker:
    """What one worker process would be: its streams, its `get_worker_info()`, its fetcher."""

    def __init__(self, iterator: Any, loader: Any, number: int) -> None:
        self.streams = _Streams(iterator._base_seed, number)
        self.info = torch_worker.WorkerInfo(
            id=number,
            num_workers=loader.num_workers,
            seed=iterator._base_seed + number,
            dataset=iterator._dataset,
        )
        self.ended = False
        self._make: Callable[[], Any] = functools.partial(
            _DatasetKind.create_fetcher,
            iterator._dataset_kind,
            iterator._dataset,
            iterator._auto_collation,
            iterator._collate_fn,
            iterator._drop_last,
        )
        with self._at_work():
            if loader.worker_init_fn is not None:
                loader.worker_init_fn(number)
            self.fetcher = self._make()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        before = torch_worker._worker_info
        torch_worker._worker_info = self.info
        try:
            with self.streams.here():
                yield
        finally:
            torch_worker._worker_info = before

    def resume(self) -> None:
        self.ended = False
        with self._at_work():
            self.fetcher = self._make()

    def fetch(self, index: Any) -> Any:
        """Raises StopIteration when an iterable dataset has no more for this worker."""
        with self._at_work():
            return self.fetcher.fetch(index)


class InProcessIterator(_BaseDataLoaderIter):
    """Batches in the order in which worker processes give them: in turns, without those at their end."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._workers = [_Worker(self, loader, w) for w in range(loader.num_workers)]
        self._turn = itertools.cycle(self._workers)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        for w in self._workers:
            w.resume()
        self._turn = itertools.cycle(self._workers)

    def _next_data(self) -> Any:
        index = next(self._sampler_iter)
        while not all(w.ended for w in self._workers):
            worker = next(self._turn)
            if worker.ended:
                continue
            try:
                return worker.fetch(index)
            except StopIteration:
                if self._dataset_kind != _DatasetKind.Iterable:
                    raise
                worker.ended = True
        raise StopIteration
