// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/doctor/checks.h"

#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/format.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/fabric/segment.h"
#include "lockstep/launch/processes/affinity.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

// The first line of a file; empty where there is none.
std::string line_of(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Cores' worth of time that the folder's control group allows; infinity for no limit.
double cpu_limit_in(const fs::path& folder) {
  double quota = 0, period = 0;
  std::istringstream(line_of(folder / "cpu.max")) >> quota >>
      period;  // version 2; "max" is no number
  if (period <= 0) {
    std::istringstream(line_of(folder / "cpu.cfs_quota_us")) >> quota;  // version 1; -1 is no limit
    std::istringstream(line_of(folder / "cpu.cfs_period_us")) >> period;
  }
  return quota > 0 && period > 0 ? quota / period : std::numeric_limits<double>::infinity();
}

double cpu_limit(const fs::path& root) {
  double limit = std::numeric_limits<double>::infinity();
  std::ifstream groups(root / "proc/self/cgroup");  // lines of id:controllers:path
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1);
    controllers = format(",{},", controllers);
    const bool version_2 = controllers == ",,";
    if (!version_2 && controllers.find(",cpu,") == std::string::npos) continue;
    const fs::path top = root / (version_2 ? "sys/fs/cgroup" : "sys/fs/cgroup/cpu");
    // A group's limit holds for those inside it too.
    for (fs::path path = fs::path(line.substr(second + 1)).relative_path();;
         path = path.parent_path()) {
      limit = std::min(limit, cpu_limit_in(top / path));
      if (path.empty()) break;
    }
  }
  return limit;
}

double memory_in_machine(const fs::path& root) {
  std::ifstream info(root / "proc/meminfo");
  std::string key;
  double kilobytes = 0;
  info >> key >> kilobytes;  // MemTotal comes first
  return kilobytes * 1024;
}

std::string limit_text(rlim_t limit) {
  return limit == RLIM_INFINITY ? "no limit" : std::to_string(limit);
}

// 0, or why a second process cannot open the memory of the first.
int try_shared_memory() {
  const fabric::Segment segment = fabric::Segment::create(4096, "lockstep-doctor");
  const pid_t child = fork();
  if (child < 0) return errno;
  if (child == 0) {
    int failure = 0;
    try {
      fabric::Segment::open(segment.handle()).data()[0] = std::byte{1};
    } catch (const SystemError& error) {
      failure = error.error_number();
    } catch (...) {
      failure = EIO;
    }
    _exit(failure & 0xff);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status)) return EIO;
  return WEXITSTATUS(status) == 0 && segment.data()[0] != std::byte{1} ? EIO : WEXITSTATUS(status);
}

bool is_gpu_node(const std::string& name) {
  return name.size() > 6 && name.starts_with("nvidia") &&
         std::all_of(name.begin() + 6, name.end(), [](unsigned char c) { return std::isdigit(c); });
}

template <class Test>
std::vector<fs::path> entries(const fs::path& folder, Test test) {
  std::vector<fs::path> found;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing))
    if (test(entry.path())) found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

Machine Machine::here() {
  Machine machine;
  machine.variable = [](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
  };
  machine.allowed_cores = static_cast<int>(launch::allowed_cores().size());
  machine.online_cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return machine;
}

Findings check_cores(const Machine& machine) {
  Findings findings;
  const int allowed = machine.allowed_cores, online = machine.online_cores;
  if (allowed < online) {
    findings.push_back({Verdict::note, "cores",
                        format("bound to {} of {}: ranks share these; taskset or the container's "
                               "cpuset decides",
                               allowed, online)});
  } else {
    findings.push_back({Verdict::ok, "cores", std::to_string(allowed)});
  }
  if (const double limit = cpu_limit(machine.root); limit < allowed) {
    findings.push_back({Verdict::warning, "CPU limit",
                        format("the control group allows the time of {:.1f} cores, threads are "
                               "started for {}: set OMP_NUM_THREADS={} for one rank",
                               limit, allowed, std::max(1, static_cast<int>(limit)))});
  }
  return findings;
}

Findings check_thread_variables(const Machine& machine) {
  Findings findings;
  const auto add = [&](Verdict verdict, const std::string& text) {
    findings.push_back({verdict, "threads", text});
  };
  for (const char* name : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}) {
    const auto value = machine.variable(name);
    if (!value) continue;
    if (std::atoi(value->c_str()) > machine.allowed_cores) {
      add(Verdict::warning,
          format("{}={} is more than the {} cores: unset it", name, *value, machine.allowed_cores));
    } else {
      add(Verdict::note,
          format("{}={} holds for every rank; unset, each gets its share of the cores", name,
                 *value));
    }
  }
  for (const char* name : {"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"}) {
    const auto value = machine.variable(name);
    if (value && *value != "false")
      add(Verdict::warning,
          format("{}={} may put the threads of all ranks on the same cores: unset it", name,
                 *value));
  }
  if (const auto value = machine.variable("OMP_WAIT_POLICY"); value && (*value)[0] == 'a')
    add(Verdict::warning, "OMP_WAIT_POLICY=active takes cores from ranks that work: unset it");
  if (findings.empty()) add(Verdict::ok, "no variable interferes");
  return findings;
}

Findings check_memory(const Machine& machine) {
  const double total = memory_in_machine(machine.root),
               available = static_cast<double>(available_memory());
  Findings findings = {
      {Verdict::ok, "memory",
       format("{}, of which this process can use {}", gigabytes(total), gigabytes(available))}};
  if (available < 1 << 30) {
    findings[0].verdict = Verdict::warning;
    findings[0].text += ": free some, or raise the container's limit";
  }
  struct statvfs shm {};
  if (statvfs((machine.root / "dev/shm").c_str(), &shm) == 0) {
    const double size = static_cast<double>(shm.f_blocks) * static_cast<double>(shm.f_frsize);
    if (size < 1 << 30) {
      findings.push_back({Verdict::note, "/dev/shm",
                          format("{:.0f} MiB: enough for Lockstep, which does not use it, but NCCL "
                                 "and MPI may need more (docker run --shm-size=1g)",
                                 size / (1 << 20))});
    } else {
      findings.push_back({Verdict::ok, "/dev/shm", gigabytes(size)});
    }
  }
  return findings;
}

Findings check_limits(const Machine& machine) {
  Findings findings;
  rlimit files{}, locked{};
  getrlimit(RLIMIT_NOFILE, &files);
  getrlimit(RLIMIT_MEMLOCK, &locked);
  // The launcher and the ranks raise the soft limit themselves.
  const bool few = files.rlim_max < 1024;
  findings.push_back(
      {few ? Verdict::warning : Verdict::ok, "open files",
       format("{}{}", limit_text(files.rlim_max),
              few ? ": the hard limit is low for many ranks; raise it (ulimit -Hn, limits.conf)"
                  : "")});
  // Only network cards that read memory by themselves need it locked.
  if (fs::exists(machine.root / "dev/infiniband") && locked.rlim_cur != RLIM_INFINITY) {
    findings.push_back({Verdict::warning, "locked memory",
                        format("{} bytes: MPI over InfiniBand needs ulimit -l unlimited",
                               limit_text(locked.rlim_cur))});
  } else {
    findings.push_back(
        {Verdict::ok, "locked memory",
         format("{}{}", limit_text(locked.rlim_cur),
                locked.rlim_cur == RLIM_INFINITY ? "" : " bytes; nothing here needs more")});
  }
  return findings;
}

Findings check_processes() {
  Findings findings;
  const auto reason = [](int failure) { return std::generic_category().message(failure); };
  const Fd self(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (!self.valid()) {
    findings.push_back({Verdict::problem, "launcher",
                        format("pidfd_open: {}: ranks cannot be watched; Linux 5.3 and a container "
                               "that allows the call are needed",
                               reason(errno))});
  }
  int failure = 0;
  try {
    failure = try_shared_memory();
  } catch (const SystemError& error) {
    failure = error.error_number();
  }
  if (failure == 0) {
    findings.push_back({Verdict::ok, "shared memory", "processes can open each other's"});
  } else {
    findings.push_back({Verdict::warning, "shared memory",
                        format("{}: processes cannot open each other's (/proc/PID/fd, memfd), so "
                               "the shm backend does not work; use --comm.backend gloo, or allow "
                               "it in the container",
                               reason(failure))});
  }
  return findings;
}

Findings check_blas(const Machine& machine) {
  const auto is_library = [](const fs::path& folder) {
    return fs::exists(folder / "libblas.so.3");
  };
  auto folders = entries(machine.root / "usr/lib", is_library);
  if (is_library(machine.root / "usr/lib")) folders.push_back(machine.root / "usr/lib");
  if (folders.empty()) {
    return {{Verdict::ok, "libblas.so.3",
             "none: only Debian's libtorch takes the system's, others bring their own"}};
  }
  Finding finding = judge_blas(fs::canonical(folders[0] / "libblas.so.3").string());
  finding.what = "libblas.so.3";
  // Whether it matters, only the half with libtorch can tell: it sees what is loaded.
  if (finding.verdict == Verdict::warning) finding.verdict = Verdict::note;
  return {finding};
}

Findings check_mpi(const Machine& machine) {
  std::istringstream folders(machine.variable("PATH").value_or(""));
  for (std::string folder; std::getline(folders, folder, ':');) {
    for (const char* name : {"mpirun", "mpiexec"}) {
      const fs::path path = fs::path(folder) / name;
      if (access(path.c_str(), X_OK) == 0) return {{Verdict::ok, "MPI", path.string()}};
    }
  }
  return {{Verdict::ok, "MPI", "no mpirun in PATH; only the mpi backend needs it"}};
}

Findings check_gpus(const Machine& machine) {
  const auto nodes = entries(machine.root / "dev", [](const fs::path& path) {
    return is_gpu_node(path.filename().string());
  });
  const fs::path driver = machine.root / "proc/driver/nvidia";
  const std::string version = line_of(driver / "version");
  if (nodes.empty() && version.empty()) return {{Verdict::ok, "GPUs", "none of NVIDIA's"}};
  if (nodes.empty()) {
    return {{Verdict::warning, "GPUs",
             "the driver is loaded, but there is no /dev/nvidia0: start the container with its "
             "GPUs (docker run --gpus all)"}};
  }
  std::vector<std::string> models;
  for (const fs::path& gpu : entries(driver / "gpus", [](const fs::path&) { return true; })) {
    const std::string line = line_of(gpu / "information");  // "Model: \t\t NVIDIA H200"
    const size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
    if (line.starts_with("Model:") && start != std::string::npos)
      models.push_back(line.substr(start));
  }
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Wed Sep ..."
  std::istringstream words(version);
  std::string number;
  for (std::string word; words >> word;)
    if (number.empty() && std::isdigit(static_cast<unsigned char>(word[0]))) number = word;
  return {{Verdict::ok, "GPUs",
           format("{}{}{}", nodes.size(), models.empty() ? "" : format(": {}", join(models)),
                  number.empty() ? "" : format("; driver {}", number))}};
}

}  // namespace lockstep::cli
