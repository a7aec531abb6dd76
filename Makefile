# `make demo` runs the main job in the lab, `make test` runs every check. See README.md and CONTRIBUTING.md.
.DEFAULT_GOAL := help
SCENARIO ?= --all
MACHINE ?= amd
export LAB_MACHINE := $(MACHINE)
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/.build/collections
export PATH := $(CURDIR)/.build/venv/bin:$(PATH)
export ANSIBLE_HOST_KEY_CHECKING := false

help: ## list the targets
	@sed -n 's/^\([a-z -]*\):.*## /\1\t/p' Makefile | expand -t 26

tools: ## install what the other targets need (.build/, and Debian packages when root)
	@.ci/packages
	@.ci/tools

demo: tools ## bring a lab host from nothing to a served model with MTP, and report
	lab/lab up --machine $(MACHINE)
	ansible-playbook -i inventory/lab playbooks/site.yml

test: lint unit sanity docs molecule ## everything

lint unit sanity docs: tools ## one kind of check
	nox -s $@

molecule: tools ## the lab scenarios (SCENARIO=name for one)
	molecule test $(if $(filter --all,$(SCENARIO)),--all,-s $(SCENARIO))

bench: tools ## benchmarks against the running lab, into benchmarks/results.md
	python benchmarks/run.py

lab-up: tools ## start the lab (MACHINE=amd or intel)
	lab/lab up --machine $(MACHINE)

lab-ssh: ## log in to the lab host
	lab/lab ssh --machine $(MACHINE)

lab-down: ## power the lab off
	lab/lab down --machine $(MACHINE)

.PHONY: help tools demo test lint unit sanity docs molecule bench lab-up lab-ssh lab-down
