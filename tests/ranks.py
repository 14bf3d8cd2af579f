"""Several ranks as processes that stay: starting them costs seconds, asking them something does not."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

PATIENCE = 100  # seconds until the parent gives a world up; far above what any case needs
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.ranks_preload"])  # ranks are forked from a process that has imported torch


class World:
    """`size` ranks; each runs what `ask` is given, in step with the others."""

    def __init__(self, size: int, timeout: float = 60) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, f: Callable[..., Any], *args: Any) -> list[Any]:
        """f(ranks, *args) on every rank: each rank's result, or "ErrorType: message", or None if the rank died."""
        for pipe in self.pipes:
            pipe.send((f, args))
        return [self._answer(pipe) for pipe in self.pipes]

    def check(self, f: Callable[..., Any], *args: Any) -> list[Any]:
        """`ask`, where no rank may fail: f returns nothing, or a value that is no text."""
        answers = self.ask(f, *args)
        assert not any(isinstance(a, str) for a in answers), "\n".join(map(str, answers))
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        try:
            assert pipe.poll(PATIENCE), "a rank hangs"
            return pipe.recv()
        except EOFError:
            return None


def _serve(rank: int, size: int, port: int, timeout: float, pipe: Connection) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    from k3lite import parallel

    with parallel.start(size, timeout=timeout) as ranks:
        while True:
            try:
                f, args = pipe.recv()
            except (EOFError, ConnectionError):
                return
            try:
                answer = f(ranks, *args)
            except Exception as e:
                answer = f"{type(e).__name__}: {e}"
            pipe.send(answer)
