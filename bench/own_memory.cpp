#include "bench/own_memory.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

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

// A rank keeps its own blocks open, and maps those of others without keeping them open.
size_t symmetric_memory() {
  size_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (!read_symlink(entry, gone).string().starts_with("/memfd:lockstep-block")) continue;
    struct stat status {};
    if (stat(entry.path().c_str(), &status) == 0)
      bytes += static_cast<size_t>(status.st_blocks) * 512;
  }
  return bytes;
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
