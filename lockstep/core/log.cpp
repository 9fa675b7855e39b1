// SPDX-License-Identifier: Apache-2.0
// The only file that includes spdlog: wheels of torch ship an fmt that breaks it, so it lives where
// torch is not seen.
#include "lockstep/core/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>

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

void write(spdlog::level::level_enum level, std::string_view message) {
  const int rank = process_rank.load(std::memory_order_relaxed);
  const std::string prefix = rank < 0 ? std::string() : "rank " + std::to_string(rank) + ": ";
  logger().log(level, "{}{}", prefix, message);
}

}  // namespace

void set_rank(int rank) { process_rank.store(rank, std::memory_order_relaxed); }

void debug(std::string_view message) { write(spdlog::level::debug, message); }
void info(std::string_view message) { write(spdlog::level::info, message); }
void warn(std::string_view message) { write(spdlog::level::warn, message); }
void error(std::string_view message) { write(spdlog::level::err, message); }

}  // namespace lockstep::log
