"""Ask an SGLang server the same questions in every state, and bring it to every kind of end.

The same code asks the real server (`tests/real`, which writes `tests/fixtures/sglang/`) and the
lab's stand-in (`tests/unit/lab/test_sglang_recordings.py`). What it brings back is free of keys,
paths, times and numbers: the form of each answer.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

KEY = "key-of-the-recording"
SEEN = ("--api-key", KEY, "--served-model-name", "tiny", "--enable-metrics")
PATHS = (
    *("/health", "/health_generate", "/ready", "/ping", "/v1/models", "/model_info"),
    *("/get_model_info", "/server_info", "/get_server_info", "/metrics", "/v1/loads", "/get_load"),
)
# Values that are words of the interface, not of this run.
WORDS = {"object", "type", "role", "status", "frontend", "finish_reason", "message", "detail"}
WORDS |= {"error", "owned_by", "code"}
# Parts of the lines by which the collection tells states apart. Which others a server writes, and
# in which order, differs from machine to machine and from run to run.
READ_LINES = (
    *("Load weight begin", "Load weight end", "KV Cache is allocated", "Init parallel begin"),
    *("The server is fired up", "Decode batch", "Prefill batch", "Health check failed"),
    *("SIGTERM received", "Gracefully exiting", "Uvicorn running", "SIGQUIT received"),
    *("Subprocess scheduler", "ERROR:", "Received sigquit", "INFO:     Shutting down"),
)
PATIENCE = 300  # seconds until a server that does not get anywhere is given up

Form = Any


class Server:
    """One running server, real or not, with its log."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        self.port = int(command[command.index("--port") + 1])
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(
        self, method: str, path: str, body: Any = None, key: str = KEY, timeout: float = 60
    ) -> Form:
        """Return the form of an answer; `refused`, `lost` and `silent` are answers too."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = body if body is None or isinstance(body, str) else json.dumps(body)
        with contextlib.closing(connection):
            try:
                connection.request(method, path, data, headers)
                answer = connection.getresponse()
                text = answer.read().decode()
            except ConnectionRefusedError:
                return "refused"
            except TimeoutError:
                return "silent"
            except (ConnectionError, http.client.HTTPException):
                return "lost"
        kind = answer.headers.get("content-type", "")
        return {"status": answer.status, "content_type": kind, "body": body_form(kind, text)}

    def status(self, path: str) -> Any:
        form = self.ask("GET", path)
        return form["status"] if isinstance(form, dict) else form

    def processes(self) -> dict[str, int]:
        """Return those of SGLang's processes that live, by title."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
                title = (entry / "cmdline").read_text(errors="replace").rstrip("\0")
            except OSError:  # ended meanwhile
                continue
            ours = "sglang::" in title or "spawn_main" in title
            if int(fields[2]) == self.process.pid and state != "Z" and ours:
                found[title if "sglang::" in title else "unnamed"] = int(entry.name)
        return found

    def until(self, condition: Callable[[], bool], running: bool = True) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.log[-3000:]
            assert not running or self.process.poll() is None, self.log[-3000:]
            time.sleep(0.01)

    def until_line(self, text: str) -> None:
        self.until(lambda: text in self.log)

    def until_ready(self) -> None:
        self.until_line("The server is fired up and ready to roll!")

    def end(self) -> int:
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Start = Callable[..., Server]


# Forms


def _plain(text: str) -> str:
    """Take everything out of a text that another run would say differently."""
    text = re.sub(r"\b[0-9a-f]{32}\b", "ID", text)
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text).replace("errors:", "error:")
    return text.replace("-N", "N")


def shape(value: Any, name: str = "") -> Form:
    """Return the types of a JSON value; elements of a list are merged into one."""
    if isinstance(value, dict):
        return {key: shape(item, key) for key, item in sorted(value.items())}
    if isinstance(value, list):
        merged: Form = None
        for item in value:
            merged = merge(merged, shape(item))
        return [merged] if value else []
    if isinstance(value, str):
        # further lines of a message name files and lines of the server's source
        return "=" + _plain(value.partition("\n")[0]) if name in WORDS else "str"
    if value is None:
        return None
    return {bool: "bool", int: "number", float: "number"}[type(value)]


def merge(one: Form, other: Form) -> Form:
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: merge(one.get(key), other.get(key)) for key in sorted({*one, *other})}
    return other if one is None else one


def body_form(content_type: str, text: str) -> Form:
    if content_type.startswith("text/event-stream"):
        events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
        forms: list[Form] = []
        for event in events:
            form = "[DONE]" if event == "[DONE]" else shape(json.loads(event))
            if form not in forms:
                forms.append(form)
        return {"events": forms}
    if content_type.startswith("application/json"):
        value = json.loads(text)
        for state in value.get("internal_states") or []:
            repeated = [name for name in state if name in value and name != "startup_time"]
            for name in repeated:  # the scheduler's own copy of the server's arguments
                del state[name]
            state["server arguments, repeated"] = len(repeated) > 500
        return shape(value)
    return metrics_form(text) if "# TYPE" in text else _plain(text)


def metrics_form(text: str) -> Form:
    """Return type and label names of every series."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    found: dict[str, Any] = {}
    for name, labels in re.findall(r"^([a-z0-9_:]+)(?:\{(.*)\})? \S+$", text, re.M):
        base = next(
            (t for t in (name, re.sub(r"_(bucket|sum|count)$", "", name)) if t in types), ""
        )
        if base.startswith("sglang:"):
            entry = found.setdefault(base, {"type": types[base], "labels": []})
            names = {*entry["labels"], *re.findall(r'(\w+)="', labels)}
            entry["labels"] = sorted(names)
    return dict(sorted(found.items()))


def line_forms(log: str) -> list[str]:
    """Return the kinds of lines of a log that the collection reads, as they first appeared."""
    forms: dict[str, None] = {}
    for line in log.splitlines():
        found = re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d((?: [A-Z]+\d+)*)\] (.*)", line)
        if found and any(part in found[2] for part in READ_LINES):
            text = re.sub(r"(/[\w.-]+)+/model\b", "MODEL", found[2])
            text = re.sub(r"127\.0\.0\.1:\d+", "CLIENT", text)
            text = re.sub(r"\d+ (OK|[A-Z][a-z]+( [A-Z][a-z]+)*)$", "STATUS", text)
            text = re.sub(r"remaining_rids=\[.*\]", "remaining_rids=[...]", text)
            forms[_plain(f"[TIME{found[1]}] {text}")] = None
    return list(forms)


# States


def answers(
    server: Server, names: Iterable[str] = PATHS, timeout: float = 30, whole: bool = False
) -> dict[str, Form]:
    """Ask for all of them at once."""
    with ThreadPoolExecutor(16) as pool:
        told = dict(zip(names, pool.map(lambda p: server.ask("GET", p, timeout=timeout), names)))
    if whole:
        return told
    return {name: _head(form) for name, form in told.items()}


def _head(form: Form) -> Form:
    """Leave the body out: it is the same in every state."""
    if isinstance(form, dict):
        return {name: form[name] for name in ("status", "content_type")}
    return form


def _generate(tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"text": "Tell me of the harbour.", "sampling_params": sampling, **more}


def _chat(**more: Any) -> dict[str, Any]:
    words = [{"role": "user", "content": "Tell me of the harbour."}]
    return {"model": "tiny", "messages": words, "max_tokens": 8, "ignore_eos": True, **more}


def _complete(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "harbour", "max_tokens": 8, "ignore_eos": True, **more}


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "generate": ("POST", "/generate", _generate(8)),
    "generate, streamed": ("POST", "/generate", _generate(8, stream=True)),
    "completion": ("POST", "/v1/completions", _complete()),
    "completion, streamed with usage": ("POST", "/v1/completions", _complete(**USAGE)),
    "chat": ("POST", "/v1/chat/completions", _chat()),
    "chat, streamed": ("POST", "/v1/chat/completions", _chat(stream=True)),
    "chat, streamed with usage": ("POST", "/v1/chat/completions", _chat(**USAGE)),
    "chat, unknown model": ("POST", "/v1/chat/completions", _chat(model="nobody")),
    "chat, no messages": ("POST", "/v1/chat/completions", {"model": "tiny"}),
    "chat, empty messages": ("POST", "/v1/chat/completions", _chat(messages=[])),
    "generate, GET": ("GET", "/generate", None),
    "generate, text is a number": ("POST", "/generate", _generate(8, text=5)),
    "generate, no text": ("POST", "/generate", {}),
    "generate, broken JSON": ("POST", "/generate", "{"),
    "generate, prompt too long": ("POST", "/generate", _generate(8, text="word " * 100_000)),
    "chat, broken JSON": ("POST", "/v1/chat/completions", "{"),
    "unknown path": ("GET", "/nowhere", None),
    "flush, idle": ("POST", "/flush_cache", {}),
    "flush with GET": ("GET", "/flush_cache", None),
}


def stop_between_two_reports(server: Server, scheduler: int) -> None:
    """Stop the scheduler while it does not hold the lock of its load report.

    With the lock held, the first `/v1/loads` blocks the server's only thread (`load_snapshot.py`,
    `file_lock`), and from then on nothing is answered at all.
    """
    for _attempt in range(9):
        os.kill(scheduler, signal.SIGSTOP)
        if server.ask("GET", "/v1/loads", timeout=2) != "silent":
            return
        os.kill(scheduler, signal.SIGCONT)
        time.sleep(1)
    raise AssertionError("the scheduler is always in its load report")


class Long:
    """A request that runs for long, in a thread of its own."""

    def __init__(self, server: Server, tokens: int) -> None:
        self.form: Form = None
        self._thread = threading.Thread(target=self._run, args=(server, tokens), daemon=True)
        self._thread.start()
        server.until(lambda: _load(server, "num_running_reqs") == 1)

    def _run(self, server: Server, tokens: int) -> None:
        self.form = server.ask("POST", "/generate", _generate(tokens), timeout=PATIENCE)

    def result(self) -> Form:
        self._thread.join(PATIENCE)
        return self.form


def life(start: Start, tokens: int) -> dict[str, Form]:
    """One server from loading to its end by SIGTERM while a request runs."""
    server = start(*SEEN)
    told: dict[str, Form] = {"loading": answers(server)}
    server.until_line("Uvicorn running")
    server.until(lambda: server.status("/v1/models") == 200)
    told["warm-up"] = answers(server)
    assert server.status("/ready") == 503, "the warm-up was over too early"
    server.until_ready()
    told["ready"] = answers(server)
    told["without a key"] = {
        path: _head(server.ask("GET", path, key="")) for path in (*PATHS, "/generate", "/nowhere")
    }
    told["requests"] = {name: server.ask(*words) for name, words in REQUESTS.items()}
    told["after requests"] = answers(
        server, ("/metrics", "/v1/loads", "/server_info", "/model_info", "/v1/models"), whole=True
    )
    scheduler = next(pid for title, pid in server.processes().items() if "scheduler" in title)
    stop_between_two_reports(server, scheduler)
    told["hung, before a /health failed"] = answers(server, ("/ready", "/v1/models"))
    slow = ("/health", "/health_generate")  # they take SGLANG_HEALTH_CHECK_TIMEOUT, 20 s
    told["hung"] = answers(server, [p for p in PATHS if p not in ("/ready", *slow)], 3)
    told["hung"] |= answers(server, slow)
    told["hung"] |= answers(server, ("/ready",))
    os.kill(scheduler, signal.SIGCONT)
    server.until(lambda: server.status("/health") == 200)
    told["back"] = answers(server, ("/ready", "/health", "/server_info"))
    long = Long(server, tokens)
    told["busy"] = {"flush": server.ask("POST", "/flush_cache", {})}
    server.process.terminate()
    server.until(lambda: server.status("/ready") == 503)
    told["draining"] = answers(server, [p for p in PATHS if not p.startswith("/get_load")])
    told["draining"]["new request"] = server.ask("POST", "/generate", _generate(2))
    told["end"] = {"request": long.result(), **_ended(server)}
    told["lines"] = line_forms(server.log)
    return told


# Ends


def _ended(server: Server, settle: float = 1) -> dict[str, Form]:
    status = server.end()
    time.sleep(settle)
    return {"status": status, "left": sorted(server.processes())}


def to_all(start: Start, tokens: int) -> dict[str, Form]:
    """SIGTERM to every process, as systemd's KillMode=control-group sends it."""
    server = start()
    server.until_ready()
    long = Long(server, tokens)
    os.killpg(server.process.pid, signal.SIGTERM)
    told = {"request": long.result(), **_ended(server)}
    return {**told, "lines": _last(server)}


def loading(start: Start, settle: float) -> dict[str, Form]:
    server = start()
    server.until_line("Load weight begin")
    asked = server.ask("GET", "/health")
    server.process.terminate()
    return {"health": asked, **_ended(server, settle)}


def warming(start: Start, settle: float) -> dict[str, Form]:
    server = start()
    server.until_line("Uvicorn running")
    server.process.terminate()
    server.until(lambda: server.status("/v1/models") == "refused")
    time.sleep(settle)
    status = server.process.poll()
    return {"status": status, "left": sorted(server.processes()), "lines": _last(server)}


def idle(start: Start) -> dict[str, Form]:
    server = start()
    server.until_ready()
    told = {
        "metrics": server.ask("GET", "/metrics"),
        "key": server.ask("GET", "/v1/models", None, ""),
    }
    server.process.terminate()
    return {**told, **_ended(server), "lines": _last(server)}


def killed(start: Start) -> dict[str, Form]:
    server = start()
    server.until_ready()
    pid = next(pid for title, pid in server.processes().items() if "scheduler" in title)
    os.kill(pid, signal.SIGKILL)
    return {**_ended(server), "lines": _last(server)}


class _Stranger(http.server.BaseHTTPRequestHandler):
    """Owns the port and answers 404. One that never answers makes the real server hang instead."""

    def do_GET(self) -> None:
        self.send_error(404)

    do_POST = do_GET

    def log_message(self, *_words: object) -> None:
        pass


def taken(start: Start) -> dict[str, Form]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Stranger) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        server = start("--port", str(other.server_address[1]))
        told = {**_ended(server), "lines": _last(server)}
        other.shutdown()
    return told


def full(start: Start, tokens: int) -> dict[str, Form]:
    """Two requests where one may run and one may wait: the third is refused."""
    server = start("--max-running-requests", "1", "--max-queued-requests", "1")
    server.until_ready()
    Long(server, tokens)
    waiting = threading.Thread(
        target=server.ask, args=("POST", "/generate", _generate(tokens)), daemon=True
    )
    waiting.start()
    server.until(lambda: _load(server, "num_waiting_reqs") == 1)
    told = {
        "generate": server.ask("POST", "/generate", _generate(2)),
        "generate, streamed": server.ask("POST", "/generate", _generate(2, stream=True)),
        "chat": server.ask("POST", "/v1/chat/completions", _chat()),
        "health": server.ask("GET", "/health"),
    }
    server.kill()
    return told


def _load(server: Server, name: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/loads", headers={"Authorization": f"Bearer {KEY}"})
        return int(json.loads(connection.getresponse().read())["loads"][0][name])


def refused(start: Start, *flags: str) -> dict[str, Form]:
    server = start(*flags)
    told = _ended(server)
    said = server.log.strip().splitlines()[-1]
    return {**told, "last line": _plain(said)}


def failed(start: Start, *flags: str, **environment: str) -> dict[str, Form]:
    server = start(*flags, **environment)
    return {**_ended(server), "lines": _last(server)}


def _last(server: Server) -> list[str]:
    """Return the lines after the server was up, or the last ones before it."""
    before, _mark, after = server.log.rpartition("ready to roll!")
    lines = line_forms(after)
    return lines if before else lines[-6:]


# Comparison


def differences(wanted: Form, got: Form, at: str = "") -> list[str]:
    """Return where one form differs from the recorded one; `null` fits every type."""
    if wanted is None or got is None:
        return []
    if at.endswith("/lines"):
        found = [f"{at}: {line} is missing" for line in wanted if line not in got]
        return found + [
            f"{at}: {line} is not in the recording" for line in got if line not in wanted
        ]
    if isinstance(wanted, dict) and isinstance(got, dict):
        found = [f"{at}: {key} is missing" for key in sorted(wanted.keys() - got.keys())]
        found += [f"{at}: {key} is not in the recording" for key in sorted(got.keys() - wanted)]
        if wanted.get("left") != got.get("left"):  # processes are no list of a JSON body
            found.append(f"/left: recorded {wanted['left']}, got {got['left']}")
        for key in wanted.keys() & got.keys():
            found += differences(wanted[key], got[key], f"{at}/{key}")
        return sorted(found)
    if isinstance(wanted, list) and isinstance(got, list):
        if not wanted or not got:
            return []
        if len(wanted) == len(got):
            return [
                x
                for n, pair in enumerate(zip(wanted, got))
                for x in differences(*pair, f"{at}[{n}]")
            ]
    return [] if wanted == got else [f"{at}: recorded {wanted!r}, got {got!r}"]
