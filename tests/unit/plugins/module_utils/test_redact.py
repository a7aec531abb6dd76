"""What is shown of command lines and logs."""

from __future__ import annotations

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._redact import redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("server --api-key hunter2 --tp 4", "server --api-key (redacted) --tp 4"),
        ("app --api_key=hunter2", "app --api_key=(redacted)"),
        ("app --apikey\thunter2", "app --apikey\t(redacted)"),
        ("app --api-key  hunter2", "app --api-key  (redacted)"),
        ("app --key hunter2", "app --key (redacted)"),
        ("app --passwd hunter2", "app --passwd (redacted)"),
        ("app --password hun,ter\"2'x", "app --password (redacted)"),
        ("app --pass hunter2", "app --pass (redacted)"),
        ("app --auth hunter2", "app --auth (redacted)"),
        ("app -token hunter2", "app -token (redacted)"),
        ("java -Djavax.password=hunter2", "java -Djavax.password=(redacted)"),
        ("env HF_TOKEN=hunter2 python serve.py", "env HF_TOKEN=(redacted) python serve.py"),
        ("docker run -e OPENAI_API_KEY=hunter2 i", "docker run -e OPENAI_API_KEY=(redacted) i"),
        ("env AWS_SECRET_ACCESS_KEY=hunter2", "env AWS_SECRET_ACCESS_KEY=(redacted)"),
        ("sh -c 'API_KEY=hunter2 exec app'", "sh -c 'API_KEY=(redacted) exec app'"),
        ("MYSQL_PWD=hunter2 mysql", "MYSQL_PWD=(redacted) mysql"),
        ("--header Authorization:Bearer hunter2", "--header Authorization:Bearer (redacted)"),
        ("-H 'Authorization: Basic hunter2'", "-H 'Authorization: Basic (redacted)"),
        ("sent Bearer hunter2", "sent Bearer (redacted)"),
        ("-H X-Api-Key:hunter2 x", "-H X-Api-Key:(redacted) x"),
        ("app --db postgres://u:hunter2@h/db", "app --db postgres://u:(redacted)@h/db"),
        ("app redis://:hun@ter2@h:1/0", "app redis://:(redacted)@h:1/0"),
        ("ServerArgs(api_key='hun ter2', port=1)", "ServerArgs(api_key=(redacted), port=1)"),
        (r"ServerArgs(api_key='a\'hunter2', tp=1)", "ServerArgs(api_key=(redacted), tp=1)"),
        ("{'admin_api_key': \"hunter2\", 'tp': 1}", "{'admin_api_key': (redacted), 'tp': 1}"),
        ("API_KEY: hunter2", "API_KEY: (redacted)"),
        ("argv: ['--api-key', 'hunter2']", "argv: ['--api-key', (redacted)]"),
        ('launch_command: "--api-key" "hunter2"', 'launch_command: "--api-key" (redacted)'),
        ("--api-key 'hunter2 cut off", "--api-key (redacted) cut off"),
    ],
)
def test_secrets_are_not_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "--max-total-tokens 100 --tokenizer-path x --tp 4",
        "--ssl-keyfile /etc/ssl/a.pem --enable-cache-report",
        "--tokenizer-mode=auto --skip-tokenizer-init",
        "--use-auth --tp 4",
        "ServerArgs(api_key=None, admin_api_key=None, port=30000)",
        '{"api_key":null,"port":30000}',
        "Prefill batch, #new-token: 512, #cached-token: 0, token usage: 0.10",
        "max_total_num_tokens=409600, gen throughput (token/s): 81.3",
        "KeyError: 'model.layers.0.weight'",
        "unexpected key: model.layers.0",
        "PWD=/root bypass=1 monkey=2 author=me keyboard=us",
        "curl http://localhost:30000/health git@github.com:a/b http://h:80/p?to=a@b",
        "/usr/bin/kvm -id 201 -device vfio-pci,host=0000:83:00.0,id=hostpci0",
    ],
)
def test_other_words_are_left_alone(text: str) -> None:
    assert redact(text) == text
