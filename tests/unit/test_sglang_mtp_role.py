"""The role sglang_mtp on this machine: what it decides, shows and hands to the role sglang.

The role sglang is a stand-in here that says what it got and answers what a test wants; its own
variables are real, and so is the module that decides, on the lab's SGLang.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plays import ROOT, own_collection, run_playbook

PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.import_role:
        name: gpuhost.inference.sglang_mtp
"""
SERVE = """
- name: Say what is served
  ansible.builtin.debug:
    msg: >-
      GOT flags {{ sglang_added_flags | to_json }} environment
      {{ sglang_added_environment | to_json }}
      proof {{ sglang_verify_acceptance }} over {{ sglang_acceptance_tokens }}
- name: Answer
  ansible.builtin.set_fact:
    sglang_ready: "{{ answer }}"
"""
WATCH = """#!/usr/bin/python
import json
window = {"seconds": 30.0, "accept_length": LENGTH, "accept_rate": 0.0, "verdict": "VERDICT"}
print(json.dumps({"changed": False, "server": {"speculation": {"window": window}}}))
"""
SPECULATION = {"accept_length": 2.4, "accept_rate": 0.4667, "verdict": "ok"}


def watch(folder: Path, verdict: str, length: str) -> None:
    """Have the watched window say this."""
    module = folder / "collections/ansible_collections/gpuhost/inference/plugins/modules"
    text = WATCH.replace("LENGTH", length).replace("VERDICT", verdict)
    (module / "sglang_info.py").write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = own_collection(
        tmp_path,
        "plugins/module_utils",
        "plugins/filter",
        "plugins/modules/sglang_mtp_info.py",
        "meta",
    )
    (own / "roles/sglang/tasks").mkdir(parents=True)
    (own / "roles/sglang_mtp").symlink_to(ROOT / "roles/sglang_mtp")
    for name in ("vars", "defaults"):
        (own / "roles/sglang" / name).symlink_to(ROOT / "roles/sglang" / name)
    (own / "roles/sglang/tasks/main.yml").write_text(f"---\n{SERVE}")
    (own / "roles/sglang/tasks/install.yml").write_text("---\n[]\n")
    (tmp_path / "play.yml").write_text(PLAY)
    watch(tmp_path, "ok", "2.5")
    site = tmp_path / "sglang/lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (tmp_path / "sglang/bin").mkdir()
    (tmp_path / "sglang/bin/python").touch()
    for name in ("sglang", "sglang-0.5.23.dist-info"):
        (site / name).symlink_to(ROOT / "lab/sglang" / name)
    subprocess.run([ROOT / "lab/sglang/make_model", tmp_path / "model"], check=True)
    return tmp_path


def play(folder: Path, running: int = 12, **variables: Any) -> str:
    server = {
        "speculation": SPECULATION,
        "effective_max_running_requests": running,
        "kv_tokens": None,
    }
    given = {
        "sglang_python": str(folder / "sglang/bin/python"),
        "sglang_model_path": str(folder / "model"),
        "sglang_mem_fraction_static": 0.8,
        "sglang_tensor_parallel_size": 4,
        "sglang_max_running_requests": 64,
        "sglang_mtp_gpu_memory_mib": 97887,
        "ansible_python_interpreter": sys.executable,
        "answer": {"server": server},
    }
    return run_playbook(folder, folder / "play.yml", variables={**given, **variables})


def test_it_predicts_serves_proves_and_compares(folder: Path) -> None:
    watch(folder, "unknown", "None")
    said = play(folder, sglang_mtp_concurrency=[1, 14, 64], sglang_mtp_window=30)
    before, after = said.split("GOT", 1)
    assert "with MTP: 24 requests run at once (the slots for states limit them)" in before
    assert "with MTP: at 64 requests at once some wait" in before
    assert '"speculative-num-draft-tokens": 4' in after.replace("\\", "")
    assert "proof True over 256" in after
    assert "Accept length 2.4 tokens for each pass, accept rate 0.4667: MTP works" in after
    assert "requests run at once: 12 where 24 was predicted (-50 %)" in after
    assert "64 were asked for: SGLang runs 12" in after
    assert "as the server is: at 14, 64 requests at once some wait" in after
    assert "verdict unknown" in after
    assert "failed=0" in after


def test_what_is_given_is_not_decided_again_and_a_dead_drafter_is_told(folder: Path) -> None:
    watch(folder, "dead", "1.0")
    said = play(
        folder,
        sglang_mtp_window=30,
        sglang_extra_flags={"speculative-num-steps": 5},
        sglang_mtp_flags={"speculative-draft-model-quantization": "unquant"},
    )
    got = said.split("GOT", 1)[1].split("environment")[0].replace("\\", "")
    assert '"speculative-num-draft-tokens": 6' in got
    assert "speculative-num-steps" not in got
    assert '"speculative-draft-model-quantization": "unquant"' in got
    assert "over 30.0 s no draft was accepted (accept length 1.0)" in " ".join(said.split())
    assert "failed=1" in said


def test_made_up_acceptance_changes_nothing(folder: Path) -> None:
    said = play(folder, sglang_environment={"SGLANG_SIMULATE_ACC_LEN": "3", "HF_TOKEN": "secret"})
    assert "its acceptance would be made up" in said
    assert "GOT" not in said
    assert "secret" not in said


def test_without_mtp(folder: Path) -> None:
    said = play(folder, sglang_mtp_state="absent")
    assert "GOT flags {} environment {} proof False over 0" in said
    assert "requests run at once" not in said
