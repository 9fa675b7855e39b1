// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/watch/process_state.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"

namespace lockstep::launch {
namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The number after a word of a file of lines "word number"; 0 where there is none.
int64_t number_in(const std::string& path, const std::string& word) {
  std::ifstream file(path);
  std::string key;
  int64_t value = 0;
  while (file >> key >> value) {
    if (key == word) return value;
  }
  return 0;
}

struct Group {
  std::string folder;
  bool unified;
};

// Of the controller, or of the unified hierarchy, whichever the process is in.
std::optional<Group> group_of(pid_t process, const std::string& controller) {
  std::ifstream file(format("/proc/{}/cgroup", process));
  std::optional<Group> found;
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      if (!found && path != "/") found = Group{"/sys/fs/cgroup" + path, true};
    } else if (("," + controllers + ",").find("," + controller + ",") != std::string::npos) {
      found = Group{format("/sys/fs/cgroup/{}{}", controller, path), false};
    }
  }
  return found;
}

bool is_frozen(pid_t process) {
  const auto group = group_of(process, "freezer");
  if (!group) return false;
  if (group->unified) return number_in(group->folder + "/cgroup.events", "frozen") == 1;
  const std::string state = content_of(group->folder + "/freezer.state");
  return state.starts_with("FROZEN") || state.starts_with("FREEZING");
}

int64_t kills_in(const std::string& folder, bool unified) {
  return number_in(folder + (unified ? "/memory.events" : "/memory.oom_control"), "oom_kill");
}

}  // namespace

std::string ProcessState::text() const {
  if (tracer != 0) {
    std::string name = content_of(format("/proc/{}/comm", tracer));
    if (!name.empty() && name.back() == '\n') name.pop_back();
    return format("is traced by pid {} ({})", tracer, name);
  }
  if (frozen) return "is in a frozen cgroup";
  switch (state) {
    case 'T':
      return "is stopped";
    case 'D':
      return "is stuck in the kernel";
    case 'R':
      return "is running";
    case 'Z':
      return "has ended";
    default:
      return "is sleeping";
  }
}

ProcessState state_of(pid_t process) {
  ProcessState result;
  const std::string stat = content_of(format("/proc/{}/stat", process));
  const size_t name_end = stat.rfind(')');  // the name may hold anything
  if (name_end != std::string::npos && name_end + 2 < stat.size())
    result.state = stat[name_end + 2];
  std::istringstream status(content_of(format("/proc/{}/status", process)));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("TracerPid:")) result.tracer = std::atoi(line.c_str() + 10);
  }
  result.frozen = is_frozen(process);
  return result;
}

MemoryKills::MemoryKills(pid_t process) : anywhere_(number_in("/proc/vmstat", "oom_kill")) {
  if (const auto group = group_of(process, "memory")) {
    folder_ = group->folder;
    unified_ = group->unified;
    in_group_ = kills_in(folder_, unified_);
  }
}

std::optional<std::string> MemoryKills::since() const {
  if (!folder_.empty() && kills_in(folder_, unified_) > in_group_) {
    const std::string limit =
        content_of(folder_ + (unified_ ? "/memory.max" : "/memory.limit_in_bytes"));
    const bool known = !limit.empty() && limit[0] >= '0' && limit[0] <= '9';
    return format("out of memory: the limit of its cgroup is {}",
                  known ? size_text(std::stoll(limit)) : "that of a cgroup above it");
  }
  if (number_in("/proc/vmstat", "oom_kill") > anywhere_)
    return "out of memory: the kernel has killed a process on this host for want of it";
  return std::nullopt;
}

}  // namespace lockstep::launch
