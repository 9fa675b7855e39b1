// SPDX-License-Identifier: Apache-2.0
#include "bench/own_memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <string_view>

#include "lockstep/core/system_memory.h"

namespace lockstep::bench {
namespace {

// A line of the system's report, in bytes.
size_t status_of(std::string_view name) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    if (word != name) continue;
    size_t kilobytes = 0;
    status >> kilobytes;
    return kilobytes * 1024;
  }
  return 0;
}

}  // namespace

size_t own_memory() { return status_of("RssAnon:") + symmetric_memory(); }

size_t resident_memory() { return status_of("VmRSS:"); }

size_t resident_peak() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<size_t>(usage.ru_maxrss) * 1024;
}

PeakMemory::PeakMemory()
    : thread_([this](const std::stop_token& stop) {
        while (!stop.stop_requested()) {
          peak_ = std::max(peak_, own_memory());
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }) {}

size_t PeakMemory::stop() {
  thread_.request_stop();
  thread_.join();
  return peak_;
}

}  // namespace lockstep::bench
