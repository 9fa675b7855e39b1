// A rank for fault tests: fault_rank BACKEND MODE VICTIM TIMEOUT_MS [STRATEGY]. After two rounds of
// work together the victim dies (die), dies with a message under way (die_in_message), stops itself
// (stop), never comes (late), or leaves (leave). The others say what they caught and how long after
// the victim's last sign of life.
#include <ATen/ATen.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"

using namespace lockstep;

namespace {

double now_ms() {
  return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
}

void report(const char* type, int lost, const char* message, double since) {
  std::printf("caught %s lost=%d after_ms=%.0f %s\n", type, lost, now_ms() - since, message);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::string backend = argv[1], mode = argv[2];
  const int victim = std::atoi(argv[3]);
  const comm::Group world =
      comm::init({.backend = backend,
                  .strategy = layout::parse_comm_strategy(argc > 5 ? argv[5] : "all-reduce"),
                  .timeout = milliseconds{std::atoi(argv[4])}});
  at::Tensor data = at::ones({100'000});
  for (int round = 0; round < 2; ++round) comm::all_reduce(data, world).wait();
  // The victim's last sign of life, on everybody's clock: one host, one monotonic clock.
  at::Tensor moment = at::full({1}, now_ms(), at::kDouble);
  comm::broadcast(moment, world, {.root = victim}).wait();

  if (world.rank() == victim) {
    if (mode == "leave") return 0;
    if (mode == "die" || mode == "die_in_message") raise(SIGKILL);
    if (mode == "stop") raise(SIGSTOP);
    pause();  // late: until the launcher ends it
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
  } catch (const std::exception& error) {
    report("other", -1, error.what(), moment.item<double>());
  }
  std::fflush(stdout);
  _exit(3);
}
