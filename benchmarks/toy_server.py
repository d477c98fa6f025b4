"""An OpenAI-compatible server of known step times, adapter slots and loads, for measuring from outside.

``python -m benchmarks.toy_server '{"base_ms": 15}'`` prints its port and serves until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from benchmarks.completions import STREAM_HEAD, chunk, event, plain, usage

METRICS = (
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="4000",gpu_memory_utilization="0.9"} 1.0\n'
    'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.0\n'
)


@dataclass
class ToyServer:
    """One step after the other: base plus tokens, plus a load for each adapter that has no slot."""

    base_ms: float = 8.0
    ms_per_token: float = 0.1
    load_ms: float = 15.0
    slots: int = 2
    names: tuple[str, ...] = ("base", "a0", "a1", "a2", "a3")
    refuse: str = ""
    """Model whose requests get a 500."""
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def start(self) -> asyncio.Server:
        """Start to listen on a free port of the loopback interface."""
        self._waiting: list[tuple[dict[str, Any], asyncio.StreamWriter, asyncio.Event]] = []
        self._resident: OrderedDict[str, None] = OrderedDict()
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._steps())
        return await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                lines = [line.lower() for line in head.split("\r\n")]
                length = [int(line.split(":")[1]) for line in lines if line.startswith("content-length")]
                body = await reader.readexactly(length[0] if length else 0)
                await self._answer(head.split(" ")[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            await plain(writer, 200, METRICS.encode())
        elif path == "/v1/models":
            listed = [{"id": name, "max_model_len": 512} for name in self.names]
            await plain(writer, 200, json.dumps({"data": listed}).encode())
        else:
            asked = json.loads(body)
            self.asked.append(asked)
            if asked["model"] == self.refuse and asked.get("stream"):
                await plain(writer, 500, b"no")
            elif not asked.get("stream"):
                await plain(writer, 200, b'{"choices": [{"text": "a"}]}')
            else:
                writer.write(STREAM_HEAD)
                done = asyncio.Event()
                self._waiting.append((asked, writer, done))
                self._work.set()
                await done.wait()

    async def _steps(self) -> None:
        running: list[tuple[dict[str, Any], asyncio.StreamWriter, asyncio.Event]] = []
        while True:
            if not running and not self._waiting:
                self._work.clear()
                await self._work.wait()
            running, self._waiting = running + self._waiting, []
            loads = sum(map(self._load, {asked["model"] for asked, _, _ in running}))
            tokens = sum(1 if asked.get("produced") else len(asked["prompt"]) for asked, _, _ in running)
            await asyncio.sleep((self.base_ms + self.ms_per_token * tokens + self.load_ms * loads) / 1e3)
            for each in list(running):
                asked, writer, done = each
                asked["produced"] = asked.get("produced", 0) + 1
                writer.write(chunk(event()))
                if asked["produced"] == asked["max_tokens"] or writer.is_closing():
                    writer.write(chunk(usage(len(asked["prompt"]), asked["produced"])) + b"0\r\n\r\n")
                    running.remove(each)
                    done.set()

    def _load(self, model: str) -> bool:
        """Give a model a slot, in place of the one used longest ago; tell whether it had none."""
        if model == "base":
            return False
        cold = model not in self._resident
        self._resident[model] = None
        self._resident.move_to_end(model)
        while len(self._resident) > self.slots:
            self._resident.popitem(last=False)
        return cold


async def _main() -> None:
    server = await ToyServer(**json.loads(sys.argv[1])).start()
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
