// SPDX-License-Identifier: Apache-2.0
// The only file that includes spdlog: wheels of torch ship an fmt that breaks it, so it lives where
// torch is not seen.
#include "lockstep/core/log.h"

#include <fcntl.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::log {
namespace {

std::atomic<int> process_rank{-1};

spdlog::logger& logger() {
  // Leaked on purpose: threads may log while the process exits.
  static auto* instance = [] {
    auto* created =
        new spdlog::logger("lockstep", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    created->set_pattern("lockstep %l: %v");
    const char* level = std::getenv("LOCKSTEP_LOG");
    created->set_level(level != nullptr ? spdlog::level::from_str(level) : spdlog::level::info);
    created->flush_on(spdlog::level::trace);
    return created;
  }();
  return *instance;
}

// The file that copy_to() names. Leaked, as the logger is.
struct Copy {
  std::recursive_mutex mutex;  // an observer whose file cannot be written logs that
  Fd file;
  bool holds = false;
  std::string held;
  std::function<void(const std::string&)> observer;

  // With the mutex. A full disk does not end a run: what cannot be written is lost.
  void write_held() {
    while (!held.empty()) {
      const ssize_t count = ::write(file.get(), held.data(), held.size());
      if (count < 0 && errno == EINTR) continue;
      held.erase(0, count > 0 ? static_cast<size_t>(count) : held.size());
    }
  }
};

Copy& copy() {
  static auto* instance = new Copy;
  return *instance;
}

void write(spdlog::level::level_enum level, std::string_view message) {
  const int rank = process_rank.load(std::memory_order_relaxed);
  const std::string prefix = rank < 0 ? std::string() : "rank " + std::to_string(rank) + ": ";
  logger().log(level, "{}{}", prefix, message);
  if (!logger().should_log(level)) return;
  const auto name = spdlog::level::to_string_view(level);
  copy_line("lockstep " + std::string(name.data(), name.size()) + ": " + prefix +
            std::string(message));
  if (level < spdlog::level::warn) return;
  const std::lock_guard lock(copy().mutex);
  if (copy().observer) copy().observer(prefix + std::string(message));
}

}  // namespace

void observe_warnings(std::function<void(const std::string&)> observer) {
  const std::lock_guard lock(copy().mutex);
  copy().observer = std::move(observer);
}

void set_rank(int rank) { process_rank.store(rank, std::memory_order_relaxed); }

void hold_lines() {
  const std::lock_guard lock(copy().mutex);
  copy().holds = true;
}

void copy_to(const std::string& path) {
  Fd file;
  if (!path.empty()) {
    file = Fd(open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
    if (!file.valid()) throw SystemError("cannot write " + path, errno);
  }
  const std::lock_guard lock(copy().mutex);
  copy().file = std::move(file);
  if (copy().file.valid()) copy().write_held();
  copy().holds = false;
  copy().held.clear();
}

void copy_line(std::string_view line) {
  const std::lock_guard lock(copy().mutex);
  if (!copy().file.valid() && !copy().holds) return;
  copy().held.append(line) += '\n';
  if (copy().file.valid()) copy().write_held();
}

void debug(std::string_view message) { write(spdlog::level::debug, message); }
void info(std::string_view message) { write(spdlog::level::info, message); }
void warn(std::string_view message) { write(spdlog::level::warn, message); }
void error(std::string_view message) { write(spdlog::level::err, message); }

}  // namespace lockstep::log
