// SPDX-License-Identifier: Apache-2.0
// A rank for fault tests: fault_rank BACKEND MODE VICTIM TIMEOUT_MS [STRATEGY]. After two rounds of
// work together the victim dies (die), dies with a message under way (die_in_message), stops itself
// (stop), never comes (late), calls something else (mismatch), or leaves (leave). The others say
// what they caught and how long after the victim's last sign of life. With give_up the victim comes
// when they have given up; with give_up_comparing they have done so before the operation itself.
// With drop they have kept neither the handles of two operations nor their group when it comes.
#include <ATen/ATen.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/job_store.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "tests/fault/freed_memory.h"

using namespace lockstep;

namespace {

double now_ms() {
  return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
}

void report(const char* type, int lost, const char* message, double since) {
  std::printf("caught %s lost=%d after_ms=%.0f %s\n", type, lost, now_ms() - since, message);
  std::fflush(stdout);
}

void give_up(const comm::Group& world, int victim) {
  const comm::Group other = world.split(0, world.rank());
  launch::Store& store = comm::job_store(world);
  const bool comes_late = world.rank() == victim;
  if (comes_late) store.get("given up", Deadline(milliseconds{60'000}));
  test::keep_freed_memory();
  try {
    const at::Tensor data = at::from_blob(
        new float[10]{}, {10}, [](void* memory) { delete[] static_cast<float*>(memory); });
    comm::all_reduce(data, world, {.timeout = milliseconds{comes_late ? 60'000 : 300}}).wait();
  } catch (const TimeoutError& error) {
    report("TimeoutError", -1, error.what(), now_ms());
  }
  if (!comes_late) store.set("given up", "yes");
  comm::barrier(other).wait();  // the engine moves on, with whatever it has
  std::printf("freed memory was %s\n",
              test::is_freed_memory_untouched() ? "left alone" : "written to");
  std::fflush(stdout);
  comm::barrier(other).wait();  // mpirun ends the job with the first rank that goes
}

void drop(const comm::Group& world, int victim) {
  comm::Group other = world.split(0, world.rank());
  launch::Store& store = comm::job_store(world);
  const at::Tensor first = at::ones({100'000}), second = at::ones({100'000});
  if (world.rank() == victim) {
    store.get("dropped", Deadline(milliseconds{60'000}));
    comm::all_reduce(first, other).wait();
    comm::all_reduce(second, other).wait();
  } else {
    (void)comm::all_reduce(first, other);
    (void)comm::all_reduce(second, other);
    other = comm::Group();
    store.set("dropped", "yes");
    const Deadline deadline(milliseconds{30'000});
    while (first.use_count() + second.use_count() > 2 && !deadline.passed()) usleep(1000);
  }
  std::printf("sums %g %g\n", first[7].item<double>(), second[7].item<double>());
  std::fflush(stdout);
  comm::barrier(world).wait();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::string backend = argv[1], mode = argv[2];
  const int victim = std::atoi(argv[3]);
  const comm::Group world =
      comm::init({.backend = backend,
                  .strategy = layout::parse_comm_strategy(argc > 5 ? argv[5] : "all-reduce"),
                  .timeout = milliseconds{std::atoi(argv[4])},
                  .check = mode != "give_up"});
  if (mode.starts_with("give_up")) {
    give_up(world, victim);
    _exit(0);
  }
  if (mode == "drop") {
    drop(world, victim);
    _exit(0);
  }
  // NCCL's operations are those on tensors of a device.
  const auto options = at::TensorOptions(backend == "nccl" ? at::kCUDA : at::kCPU);
  at::Tensor data = at::ones({100'000}, options);
  for (int round = 0; round < 2; ++round) comm::all_reduce(data, world).wait();
  // The victim's last sign of life, on everybody's clock: one host, one monotonic clock.
  at::Tensor moment = at::full({1}, now_ms(), at::kDouble);
  comm::broadcast(moment, world, {.root = victim}).wait();
  // Others may still be passing it on when the victim has sent it.
  launch::Store& store = comm::job_store(world);
  const auto received = [](int rank) { return "received by " + std::to_string(rank); };
  store.set(received(world.rank()), "yes");

  if (world.rank() == victim) {
    for (int rank = 0; rank < world.size(); ++rank)
      store.get(received(rank), Deadline(milliseconds{60'000}));
    if (mode == "leave") return 0;
    if (mode == "die" || mode == "die_in_message") raise(SIGKILL);
    if (mode == "stop") raise(SIGSTOP);
    while (mode == "late") pause();  // until the launcher ends it
    data = at::ones({7}, options);   // mismatch
  }
  try {
    if (mode == "die_in_message") {
      comm::recv(data, victim, world).wait();
    } else {
      comm::all_reduce(data, world).wait();
    }
    std::printf("caught nothing\n");
  } catch (const PeerLost& error) {
    report("PeerLost", error.rank(), error.what(), moment.item<double>());
  } catch (const TimeoutError& error) {
    report("TimeoutError", -1, error.what(), moment.item<double>());
  } catch (const MismatchError& error) {
    report("MismatchError", -1, error.what(), moment.item<double>());
  } catch (const std::exception& error) {
    report("other", -1, error.what(), moment.item<double>());
  }
  std::fflush(stdout);
  _exit(3);
}
