# SPDX-License-Identifier: Apache-2.0
# `make` says what there is. Each target does what has to come before it.
PRESET ?= release
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
MAKEFLAGS += --no-print-directory
BUILD = $(if $(filter release,$(PRESET)),build,build/$(PRESET))

# $(call configure,PRESET,FOLDER,OPTIONS). A folder keeps the generator it began with; a new one gets Ninja, or make where
# there is no Ninja. Later changes to CMake files are the generator's business; only a new preset or new options are ours.
define configure
	@if $(if $(3),true,[ ! $(2)/configured -nt CMakePresets.json ]); then \
	  generator=$$(sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' $(2)/CMakeCache.txt 2>/dev/null); \
	  if [ -z "$$generator" ]; then \
	    if command -v ninja >/dev/null; then generator=Ninja; else generator="Unix Makefiles"; fi; \
	  fi; \
	  cmake --preset $(1) -B $(2) -G "$$generator" --log-level=WARNING $(3) && touch $(2)/configured; \
	fi
endef
# $(call ctest,FOLDER,OPTIONS). Three places more than there are cores: many tests wait, for a deadline or for their peers. Of an
# entry that runs whole grids an hour is enough, of others ten minutes.
define ctest
	@ctest -j $$(($(JOBS) + 3)) --timeout $${LOCKSTEP_TEST_ALL:+3}600 --no-tests=error --test-dir $(1) $(2) || { python3 tests/package/test_failures.py $(1); exit 1; }
endef

.NOTPARALLEL:
.PHONY: help setup configure build train tests test test-times bench install package release api lint tidy check-all check-gpu check-pages check-wide check-asan check-tsan check-no-pch faults faults-all clean

help:
	@echo "make build               install what is missing (as root), configure, compile; the command is build/bin/lockstep"
	@echo "make train               build, then train a small GPT on 2 ranks and let it write (a few minutes)"
	@echo "make test                build, then run all tests"
	@echo "make test-times          what took longer in the last make test than its budget"
	@echo "make bench               build the programs that docs/performance.md measures with"
	@echo "make install PREFIX=DIR  build, then install; PREFIX is /usr/local if not given"
	@echo "make package             build, then make a Debian package in build/package"
	@echo "make release VERSION=V   tag this commit, and put the source archive and its notes into build/release"
	@echo "make api                 write the reference of the installed headers to build/docs/api.md"
	@echo "make lint                formatting, the layer rule, and words that have a better term"
	@echo "make tidy                clang-tidy over the half that does not use torch; SINCE=COMMIT: over what has changed since"
	@echo "make check-all           lint, all tests with whole grids, pages in Chromium, and builds with sanitizers"
	@echo "make check-no-pch        compile every file by itself without precompiled headers (an hour; then only what has changed)"
	@echo "make faults              inject each fault of the catalogue once (root; under 30 minutes); FAULTS=A1,C: only these"
	@echo "make faults-all          the same with full counts and ten minutes of fuzzing (hours)"
	@echo "make check-gpu           build against libtorch with CUDA and run all tests, those of GPUs and NCCL too"
	@echo "make clean               remove all build folders"
	@echo "PRESET=dev|asan|tsan|cuda builds another kind, in build/PRESET; CMAKE_ARGS=-D... passes options on; JOBS=N"

setup:
	@cmake/setup

configure: setup
	$(call configure,$(PRESET),$(BUILD),$(CMAKE_ARGS))

build: configure
	@cmake --build $(BUILD) -j $(JOBS) --target library commands

# A small GPT learns C++ from the headers on this machine, then writes some. RANKS=N, TRAIN_ARGS="--train.steps 100".
RANKS ?= 2
train: configure
	@cmake --build $(BUILD) -j $(JOBS) --target commands
	@rm -rf $(BUILD)/train
	$(BUILD)/bin/lockstep train -n $(RANKS) --config examples/train.toml --run.dir $(BUILD)/train $(TRAIN_ARGS)
	$(BUILD)/bin/lockstep sample --checkpoint $(BUILD)/train --prompt "namespace std {" --tokens 600
	@$(BUILD)/bin/lockstep report $(BUILD)/train

test: tests
	$(call ctest,$(BUILD))

# What `make test` runs, and what docs/performance.md measures.
tests: configure
	@cmake --build $(BUILD) -j $(JOBS)

# What took longer in the last `make test` than tests/budget.txt says.
test-times:
	@python3 tests/package/test_times.py $(BUILD) tests/budget.txt

bench: configure
	@cmake --build $(BUILD) -j $(JOBS) --target benchmarks

install: build
	@cmake --install $(BUILD) --prefix $(PREFIX)

# A Debian package of what `install` installs, for Debian's libtorch.
package: build
	@[ -f $(BUILD)/CPackConfig.cmake ] || \
	  { echo "package: a Debian package needs Debian's libtorch (libtorch-dev); this build uses another" >&2; exit 1; }
	@for tool in dpkg-shlibdeps file; do command -v $$tool >/dev/null || \
	  { echo "package: $$tool is missing; without it the package would depend on nothing" >&2; exit 1; }; done
	@rm -rf $(BUILD)/package
	@cpack --config $(BUILD)/CPackConfig.cmake -G DEB -B $(BUILD)/package
	@rm -rf $(BUILD)/package/_CPack_Packages

release:
	@cmake/release "$(VERSION)"

# The reference of the installed headers.
api:
	@python3 tests/package/api_reference.py . --output $(BUILD)/docs/api.md
	@echo "api: $(BUILD)/docs/api.md"

lint:
	@python3 tests/package/layers_test.py .
	@python3 tests/package/words_test.py .
	@if command -v clang-format >/dev/null; then \
	  find lockstep tests examples bench -name '*.h' -o -name '*.cpp' -o -name '*.cu' | xargs clang-format --dry-run --Werror; \
	else \
	  echo "lint: clang-format is not installed; formatting is not checked"; \
	fi

# clang-tidy 14 reads neither gcc's precompiled headers nor libtorch as C++20, so it sees the half without them. SINCE=COMMIT: only
# what has changed since then.
TIDY = $(foreach layer,core codec layout schedule plan io formats data config launch fabric,'lockstep/$(layer)/*.cpp')
tidy: setup
	$(call configure,release,build/tidy,-DLOCKSTEP_TORCH=OFF -DLOCKSTEP_TESTS=OFF -DLOCKSTEP_WERROR=OFF -DCMAKE_UNITY_BUILD=OFF)
	@if ! command -v clang-tidy >/dev/null; then echo "tidy: clang-tidy is not installed; nothing is checked"; exit; fi; \
	if [ -n "$(SINCE)" ] && ! git rev-parse --verify --quiet "$(SINCE)^{commit}" >/dev/null; then \
	  echo "tidy: this clone does not have $(SINCE); nothing is checked"; exit; fi; \
	files=$$(if [ -n "$(SINCE)" ]; then git diff --name-only --diff-filter=d $(SINCE) -- $(TIDY); else git ls-files $(TIDY); fi); \
	[ -z "$$files" ] || echo $$files | xargs -n 1 -P $(JOBS) clang-tidy -p build/tidy --quiet

check-all: lint check-wide check-pages check-asan check-tsan

# Everything, on a machine with a GPU: also the tests of CUDA, and of NCCL with several ranks on one GPU.
check-gpu:
	@$(MAKE) test PRESET=cuda

# All tests, with the whole of what `make test` takes samples of.
check-wide: export LOCKSTEP_TEST_ALL=1
check-wide: export OMP_NUM_THREADS=1
check-wide: tests bench
	$(call ctest,$(BUILD))
	if command -v mpirun >/dev/null; then LOCKSTEP_TEST_BACKEND=mpi mpirun -n 4 --oversubscribe --allow-run-as-root --bind-to none \
	  $(BUILD)/bin/process_tests --gtest_filter='-*Memory*'; fi
	for ranks in 1 2 3 4 8; do for backend in shm gloo mpi; do \
	  $(BUILD)/bin/lockstep selftest -n $$ranks --backend $$backend || exit 1; done; done
	for backend in shm gloo mpi; do $(BUILD)/bin/lockstep selftest -n 2 --backend $$backend --large || exit 1; done

# Reports of real runs in Debian's Chromium; pages and pictures stay in build/pages. PICTURES=docs/images: those of the documentation too.
check-pages: tests
	@command -v chromium >/dev/null || { echo "check-pages: chromium is not installed (apt-get install chromium)" >&2; exit 1; }
	python3 tests/report/page_test.py $(BUILD)/bin/lockstep $(BUILD)/pages $(if $(PICTURES),--pictures $(PICTURES))

# Sanitizers over the half that does not use torch: libtorch is not built with them.
check-asan check-tsan: check-%: setup
	$(call configure,$*,build/check-$*,-DLOCKSTEP_TORCH=OFF)
	@cmake --build build/check-$* -j $(JOBS)
	$(call ctest,build/check-$*)

# Precompiled headers, and sources compiled together, hide a forgotten include. Only what has changed since the last time is compiled.
check-no-pch: setup
	$(call configure,release,build/check-no-pch,-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DCMAKE_UNITY_BUILD=OFF -DCMAKE_CXX_COMPILER_LAUNCHER=$(CURDIR)/tests/package/syntax_only.sh)
	@ninja -C build/check-no-pch -j $(JOBS) -k 0 $$(ninja -C build/check-no-pch -t targets all | sed -n 's/\.o: CXX_COMPILER.*/.o/p')

# The catalogue of faults: what was injected, what was seen, pass or fail. FAULTS=A1,A4 or letters; the table is in build/faults.md.
FAULTS ?=
faults: tests
	python3 tests/fault/catalogue/run.py $(BUILD)/bin --only "$(FAULTS)" --markdown $(BUILD)/faults.md

# Fuzzers need clang, and instrumented sources.
faults-all: tests
	$(call configure,release,build/fuzz,-DLOCKSTEP_TORCH=OFF -DLOCKSTEP_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DCMAKE_UNITY_BUILD=OFF)
	@cmake --build build/fuzz -j $(JOBS) --target safetensors_fuzz manifest_fuzz
	python3 tests/fault/catalogue/run.py $(BUILD)/bin --all --only "$(FAULTS)" --markdown $(BUILD)/faults.md

clean:
	@rm -rf build
