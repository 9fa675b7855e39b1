// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/system_memory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <system_error>

namespace lockstep {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// The number in a file that holds just one; "max" and a missing file mean no limit.
uint64_t number_in(const std::string& path) {
  uint64_t value = kUnlimited;
  std::ifstream file(path);
  return file >> value ? value : kUnlimited;
}

uint64_t room_below(uint64_t limit, uint64_t used) {
  return limit == kUnlimited || used == kUnlimited ? kUnlimited : limit - std::min(limit, used);
}

uint64_t room_in_machine() {
  std::ifstream info("/proc/meminfo");
  std::string key, unit;
  uint64_t kilobytes = 0;
  while (info >> key >> kilobytes && std::getline(info, unit)) {
    if (key == "MemAvailable:") return kilobytes * 1024;
  }
  return kUnlimited;
}

uint64_t room_in_control_group() {
  uint64_t room = kUnlimited;
  std::ifstream groups("/proc/self/cgroup");  // lines of id:controllers:path
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      path = line.substr(second + 1);
    if (controllers.empty()) {  // version 2
      const std::string folder = "/sys/fs/cgroup" + path;
      room = std::min(room, room_below(number_in(folder + "/memory.max"),
                                       number_in(folder + "/memory.current")));
    } else if (controllers.find("memory") != std::string::npos) {  // version 1
      const std::string folder = "/sys/fs/cgroup/memory" + path;
      room = std::min(room, room_below(number_in(folder + "/memory.limit_in_bytes"),
                                       number_in(folder + "/memory.usage_in_bytes")));
    }
  }
  return room;
}

}  // namespace

size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

uint64_t available_memory() { return std::min(room_in_machine(), room_in_control_group()); }

// A rank keeps its own blocks open, and maps those of others without keeping them open.
uint64_t symmetric_memory() {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (!read_symlink(entry, gone).string().starts_with("/memfd:lockstep-symmetric")) continue;
    struct stat status {};
    if (stat(entry.path().c_str(), &status) == 0)
      bytes += static_cast<uint64_t>(status.st_blocks) * 512;
  }
  return bytes;
}

}  // namespace lockstep
