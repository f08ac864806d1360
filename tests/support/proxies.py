"""HAProxy and nginx in front of a server, configured as in `docs/operations.md`."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.server import free_port
from support.waiting import wait_for

ADDRESS = "127.0.0.10"
"""From which the proxies call the server."""

_HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 5s
  timeout server 5s
  http-reuse always
frontend callers
  bind 127.0.0.1:{port}
  option forwardfor
  http-request set-header X-Forwarded-Proto http
  default_backend loraplex
backend loraplex
  server one 127.0.0.1:{server_port} source {address}
"""
_NGINX = """
daemon off;
master_process off;
pid {folder}/pid;
error_log stderr warn;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream loraplex {{ server 127.0.0.1:{server_port}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{port};
    client_body_timeout 5s;
    client_header_timeout 5s;
    location / {{
      proxy_pass http://loraplex;
      proxy_bind {address};
      proxy_http_version 1.1;
      proxy_request_buffering off;
      proxy_buffering off;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
      proxy_set_header X-Forwarded-Proto $scheme;
    }}
  }}
}}
"""


@contextmanager
def haproxy(program: str, server_port: int, folder: Path) -> Iterator[int]:
    """HAProxy before the server at this port; its own port."""
    with _running([program, "-db", "-f"], _HAPROXY, server_port, folder) as port:
        yield port


@contextmanager
def nginx(program: str, server_port: int, folder: Path) -> Iterator[int]:
    """nginx before the server at this port; its own port."""
    command = [program, "-e", "stderr", "-p", str(folder), "-c"]
    with _running(command, _NGINX, server_port, folder) as port:
        yield port


@contextmanager
def _running(command: list[str], template: str, server_port: int, folder: Path) -> Iterator[int]:
    port, config, log = free_port(), folder / "proxy.conf", folder / "proxy.log"
    places = {"port": port, "server_port": server_port, "address": ADDRESS, "folder": folder}
    config.write_text(template.format(**places))
    with log.open("wb") as output:
        process = subprocess.Popen([*command, str(config)], stdout=output, stderr=output)

    def listens() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    try:
        wait_for(listens, seconds=30)
        yield port
    finally:
        process.terminate()
        process.wait(30)
