"""What eighteenth programs share: a batcher with its clients, and listeners to tokens in another process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

from registry import in_thread
from seventh_host import quickest


class Batcher:
    """Requests of clients who each wait for their answer before they ask again, and how a batcher collects them.

    Attributes:
        waiting: whose requests are there; answered: one for each client that is owed an answer.
    """

    def __init__(self, clients: int, each: int) -> None:
        self.waiting, self.over, self.changed = list[int](), False, threading.Condition()
        self.answered = [threading.Semaphore(each) for _ in range(clients)]
        self.threads = [in_thread(lambda client=client: self.ask(client)) for client in range(clients)]

    def ask(self, client: int) -> None:
        """What a client does."""
        while self.answered[client].acquire() and not self.over:
            with self.changed:
                self.waiting.append(client)
                self.changed.notify()

    def collect(self, most: int, seconds: float) -> list[int]:
        """The requests of a batch: `most`, or what is there after so long."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.waiting) >= most, seconds)
            batch, self.waiting = self.waiting[:most], self.waiting[most:]
        return batch

    def answer(self, batch: list[int]) -> None:
        """Each of them has its answer."""
        for client in batch:
            self.answered[client].release()

    def stop(self) -> None:
        """The clients end."""
        self.over = True
        self.answer(list(range(len(self.threads))))
        for thread in self.threads:
            thread.join()


LISTENERS = """
import os, selectors, socket, sys
told, whole = int(sys.argv[1]), 0
waiting = selectors.DefaultSelector()
for number in sys.argv[2:]:
    waiting.register(socket.socket(fileno=int(number)), selectors.EVENT_READ)
while waiting.get_map():
    for key, _ in waiting.select():
        got = key.fileobj.recv(65_536)
        whole += got.count(b"\\n\\n")
        if not got:
            waiting.unregister(key.fileobj)
os.write(told, b"%d" % whole)
"""


class Listeners:
    """A process that listens on 32 sockets to the tokens of sequences, each of which is told as an event in JSON.

    Attributes:
        count: of sockets; told: how many events they were told; each_ns: what it takes to tell one.
    """

    count = 32

    def __init__(self) -> None:
        self.told, pairs = 0, [socket.socketpair() for _ in range(self.count)]
        self.mine, theirs = [one for one, _ in pairs], [one for _, one in pairs]
        self.end, told = os.pipe()
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        numbers = [one.fileno() for one in theirs]
        command = [sys.executable, "-S", "-c", LISTENERS, str(told), *map(str, numbers)]
        self.child = subprocess.Popen(command, pass_fds=[told, *numbers], env=env)
        os.close(told)
        for one in theirs:
            one.close()
        self.each_ns = max(quickest(lambda: self.tell(0, 64), 8) // 64, 1)

    def tell(self, step: int, sequences: int) -> None:
        """A step's token of each sequence, to the socket of its client."""
        for sequence in range(sequences):
            choice = {"index": sequence, "delta": {"role": "assistant", "content": f" token {step}"}, "stop": None}
            event = {"id": f"chat-{sequence:06d}", "object": "chunk", "created": step, "choices": [choice]}
            self.mine[sequence % self.count].sendall(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.told += sequences

    def told_in(self, us: int) -> int:
        """How many can be told in so long."""
        return min(max(us * 1_000 // self.each_ns, 8), 1_000)

    def stop(self) -> None:
        """Raises unless they have heard all; the process ends."""
        for one in self.mine:
            one.close()
        heard = int(os.read(self.end, 32))
        self.child.wait()
        os.close(self.end)
        if heard != self.told:
            raise RuntimeError(f"{heard} of {self.told} tokens were heard")
