# `make demo` runs the main job in the lab, `make test` runs every check. See README.md and CONTRIBUTING.md.
.DEFAULT_GOAL := help
MACHINE ?= amd
FOR ?= 300
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

test: tools ## everything
	$(MAKE) --no-print-directory --jobs=2 static unit
	$(MAKE) --no-print-directory molecule

# beside the unit tests, as most of it has use for one core only
static: tools
	nox

lint sanity docs: tools ## one kind of check
	nox -s $@

unit: tools ## the unit tests, on every core; a module's tests stay together
	pytest --numprocesses=auto --dist=loadscope --no-loadscope-reorder

molecule: tools ## the lab scenarios (SCENARIO=name for one)
ifdef SCENARIO
	molecule test -s $(SCENARIO)
else
	lab/lab image
	$(MAKE) --no-print-directory --jobs=2 lane-amd lane-intel
endif

# one lane for each machine of the lab, side by side; most scenarios run on either, identity_trial needs intel. serve and
# tune come last, since what they deploy is nothing that others expect; tune is too long for every run: TUNE=all
INTEL := power_cut hung_unbind identity_trial serve $(if $(TUNE),tune)
# in this order, since the faults that neighbour makes stay in the log of its boot
AMD := check_mode default recover
AMD += $(filter-out $(INTEL) $(AMD) tune,$(notdir $(patsubst %/molecule.yml,%,$(wildcard molecule/*/molecule.yml))))
lane-amd: TAKES := $(AMD)
lane-intel: TAKES := $(INTEL)
lane-amd lane-intel:
	@.ci/lane $(@:lane-%=%) $(TAKES)

bench: tools ## benchmarks (running lab, generated logs, SGLang's releases), into benchmarks/results.md
	python benchmarks/run.py
	python benchmarks/health_log.py
	python benchmarks/sglang_flags.py
	python benchmarks/clients.py

fuzz: tools ## search for bytes that break the reading of kernel logs (FOR=seconds)
	pip install --quiet --disable-pip-version-check atheris==3.0.0
	mkdir -p .build/corpus
	cd .build && python ../tests/fuzz/kernel_log.py -max_total_time=$(FOR) -len_control=0 -max_len=600 -timeout=10 corpus

test-sglang: tools ## a real SGLang on the CPU (3 GB, 15 minutes) against the recordings (RECORD=1: write them anew)
	tests/real/install
	pytest tests/real $(if $(RECORD),--record)

lab-up: tools ## start the lab (MACHINE=amd or intel)
	lab/lab up --machine $(MACHINE)

lab-ssh: ## log in to the lab host
	lab/lab ssh --machine $(MACHINE)

lab-down: ## power the lab off
	lab/lab down --machine $(MACHINE)

.PHONY: help lane-amd lane-intel tools demo test static lint unit sanity docs molecule bench fuzz test-sglang lab-up lab-ssh lab-down
