# make build | test | install | check-all | clean. Each does everything that has to come before it.
BUILD ?= build
PRESET ?= release
JOBS ?= $(shell nproc)

.PHONY: all setup build test check-all install lint clean

all: build

setup:
	@cmake/setup

build: setup
	@cmake --preset $(PRESET) $(CMAKE_ARGS) --log-level=WARNING
	@cmake --build --preset $(PRESET) -j $(JOBS)

test: build
	@ctest --preset $(PRESET)
