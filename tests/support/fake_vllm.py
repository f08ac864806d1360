"""Answers as vLLM's server: a token of text after the other, whatever is asked.

`python fake_vllm.py --port PORT ...`; it prints its other arguments and how much memory its
environment gives to KV.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self._send({"choices": [{"text": body["model"]}]})
            time.sleep(0.002)  # tokens that arrive together have no gap
        self._send({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: object) -> None:
        text = json.dumps(event, separators=(",", ":"))
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is said about requests."""


if __name__ == "__main__":
    sys.stdout.write(f"{' '.join(sys.argv[1:])} KV {os.environ['VLLM_CPU_KVCACHE_SPACE']}\n")
    sys.stdout.flush()
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
